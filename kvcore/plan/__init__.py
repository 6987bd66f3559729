"""From specs and layouts to one `KVCacheConfig` a rank: pure arithmetic, no torch.

The package is callable: ``kvcore.plan(...)`` is `kvcore.plan.planner.plan`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.plan.planner import Plan


class _CallablePackage(ModuleType):
    """Lets the name `kvcore.plan` be both the room and the function that it exists for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        from kvcore.plan.planner import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
