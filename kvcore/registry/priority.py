"""Ranks for ``backend=auto``, by device class and kind of cache: from data first, else as declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcore.attention.declaration import BackendSpec, DeviceFacts

# Device class, or <device class>/<kind of cache>, to backend to rank.
Priorities = Mapping[str, Mapping[str, int]]


def device_classes(facts: DeviceFacts) -> tuple[str, ...]:
    """The classes of a device, the narrowest first: ``cuda:sm90``, ``cuda:sm9x``, ``cuda``."""
    if facts.capability is not None:
        major, minor = facts.capability
        return (f"{facts.kind}:sm{major}{minor}", f"{facts.kind}:sm{major}x", facts.kind)
    if facts.arch:
        return (f"{facts.kind}:{facts.arch.partition(':')[0]}", facts.kind)
    return (facts.kind,)


def rank(spec: type[BackendSpec], facts: DeviceFacts, kind: str, priorities: Priorities) -> int:
    """The rank of a backend for caches of one kind on a device; 0 where nothing says one.

    The narrower class wins, then the entry for the kind of cache, then `priorities` over the declaration.
    """
    return given(spec.name, facts, kind, priorities, spec.priority) or 0


def given(
    name: str, facts: DeviceFacts, kind: str, priorities: Priorities, declared: Mapping[str, int] | None = None
) -> int | None:
    """As `rank`, for a backend that may have no declaration; None where nothing says one."""
    for key in _keys(facts, kind):
        found = priorities.get(key, {}).get(name, (declared or {}).get(key))
        if found is not None:
            return found
    return None


def _keys(facts: DeviceFacts, kind: str) -> Iterator[str]:
    for name in device_classes(facts):
        yield f"{name}/{kind}"
        yield name
