"""What an engine is built with: a paged cache for a model, or one backend for blocks that the engine keeps itself.

Import from here, and the types of a backend's contract from `kvcore.backend`; every other module is internal and may
change. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.config.paged_cache import PagedCache
    from kvcore.config.serving_backend import ServingBackend
    from kvcore.manage.allocation import StepAllocation
    from kvcore.manage.manager import KVCacheManager
    from kvcore.memory.lent_blocks import batch_of_tables, block_views
    from kvcore.models.bridge_checks import check_call

__all__ = [
    "KVCacheManager",
    "PagedCache",
    "ServingBackend",
    "StepAllocation",
    "batch_of_tables",
    "block_views",
    "check_call",
]

MODULE_OF = {
    "PagedCache": "kvcore.config.paged_cache",
    "ServingBackend": "kvcore.config.serving_backend",
    "StepAllocation": "kvcore.manage.allocation",
    "KVCacheManager": "kvcore.manage.manager",
    "batch_of_tables": "kvcore.memory.lent_blocks",
    "block_views": "kvcore.memory.lent_blocks",
    "check_call": "kvcore.models.bridge_checks",
}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"kvcore.cache has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
