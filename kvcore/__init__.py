"""kvcore: the paged KV cache of LLM inference as a library with a contract.

Names are imported when they are first used, so that `import kvcore` loads neither torch nor hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore import plan, testing
    from kvcore.attention.backend import AttentionBackend
    from kvcore.attention.declaration import BackendSpec
    from kvcore.config.library import LLM
    from kvcore.config.paged_cache import PagedCache
    from kvcore.manage.manager import KVCacheManager
    from kvcore.registry.hookspecs import hookimpl

__version__ = "0.1.0"

_HOMES = {
    "AttentionBackend": "kvcore.attention.backend",
    "BackendSpec": "kvcore.attention.declaration",
    "KVCacheManager": "kvcore.manage.manager",
    "LLM": "kvcore.config.library",
    "PagedCache": "kvcore.config.paged_cache",
    "hookimpl": "kvcore.registry.hookspecs",
}
_ROOMS = ("plan", "testing")
__all__ = ["LLM", "AttentionBackend", "BackendSpec", "KVCacheManager", "PagedCache", "hookimpl", "plan", "testing"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"kvcore.{name}")
    raise AttributeError(f"module 'kvcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
