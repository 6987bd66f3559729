"""`cache.dtype=auto`: what the checkpoint says of its cache, where a backend serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcore.engine.planning import select
from kvcore.engine.settings import CacheSettings, EngineSettings
from kvcore.errors import KVCoreError
from kvcore.models.stated_cache import CacheStatement
from kvcore.registry.registry import Registry
from kvcore.registry.select import Purpose


def as_stated(
    make: Callable[[CacheSettings], EngineSettings],
    cache: CacheSettings,
    statement: CacheStatement | None,
    registry: Registry,
    purpose: Purpose,
) -> EngineSettings:
    """Settings whose cache has the type that the checkpoint states, and a note on it.

    Args:
        make: Gives the settings of a cache.
        cache: As the user asked; a `cache.dtype` given by hand wins.
        statement: What the checkpoint says, or None.
        registry: The backends.
        purpose: As for `choose_backends`.

    Returns:
        The settings, in the model's own type where no backend serves the stated one; a note of the facts says which.
    """
    own = make(cache)
    if statement is None or cache.dtype != "auto":
        return own
    if statement.dtype is None:
        return _not_followed(statement, own, "kvcore stores no such cache")
    scales = cache.scales or statement.scales
    try:
        stated = make(replace(cache, dtype=statement.dtype, scales=scales))
        if stated.facts.caches == own.facts.caches:
            return own  # every kind is given by hand, or none holds keys and values
        rows = select(stated, registry, purpose=purpose, strict=False).classes
    except KVCoreError as error:
        return _not_followed(statement, own, error.message)
    refused = [r for r in rows if r.chosen is None and any(c in stated.facts.queries for c in r.cache_ids)]
    if refused:
        who = "no backend serves" if refused[0].wanted is None else f"{refused[0].wanted} does not serve"
        return _not_followed(statement, own, f"{who} {statement.dtype} in its {refused[0].kind} caches")
    return _with_note(stated, f"cache.dtype=auto follows the checkpoint: {statement.dtype} ({statement.where})")


def _not_followed(statement: CacheStatement, own: EngineSettings, why: str) -> EngineSettings:
    return _with_note(
        own,
        f"the checkpoint states another cache than the {own.facts.dtype} planned here "
        f"({statement.where} is {statement.said}): {why}",
    )


def _with_note(settings: EngineSettings, note: str) -> EngineSettings:
    return replace(settings, facts=replace(settings.facts, notes=(*settings.facts.notes, note)))
