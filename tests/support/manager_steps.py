"""One step of a manager, whole."""

from __future__ import annotations

from kvcore.manage.manager import KVCacheManager
from kvcore.manage.step import ScheduledRequest


def run(manager: KVCacheManager, *asks: tuple[str, int], **sampled: int):
    """One step from allocate to retire."""
    given = manager.allocate([ScheduledRequest(*a) for a in asks])
    manager.commit(given.step, {name: [token] for name, token in sampled.items()})
    manager.retire(given.step)
    return given
