"""Refusals that must be seen to happen, and exceptions in one line."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcore.attention.query import AttentionQuery
from kvcore.errors import BackendUnsupportedError, KVCoreError
from kvcore.registry.choice import BackendChoice
from kvcore.registry.registry import Registry, told
from kvcore.registry.select import choose_backends
from kvcore.spec.cache_spec import CacheId
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CellResult, CheckFailure
from kvcore.testing.cases.planning import Place


def timed(action: Callable[[], CellResult]) -> CellResult:
    """The result with its wall time."""
    begun = time.perf_counter()
    result = action()
    return replace(result, seconds=time.perf_counter() - begun)


def seen_to_refuse(place: Place, case: Case, queries: Sequence[AttentionQuery]) -> None:
    """The refusal happens where an engine asks, before anything is made.

    Raises:
        CheckFailure: Selection takes the backend all the same.
    """
    registry = Registry()
    registry.backends[place.spec.name] = place.spec
    specs = [case.cache_spec()] + ([case.beside().cache_spec()] if case.neighbour else [])
    caches = {CacheId(i): s for i, s in enumerate(specs)}
    asked = {CacheId(i): q for i, q in enumerate(queries)}
    choice = BackendChoice(place.spec.name, options={place.spec.name: place.options})
    try:
        choose_backends(
            caches,
            asked,
            place.facts,
            choice,
            registry,
            purpose="plan",
            block_size=case.block_size,
            block_first_only=case.placement == "packed",
        )
    except BackendUnsupportedError:
        return
    except KVCoreError as error:
        raise CheckFailure(f"refused, but not as BackendUnsupportedError: {error}") from error
    raise CheckFailure("declared unsupported, but selection takes the backend")


def raised(error: BaseException) -> str:
    """An exception in one line, with the innermost place in the backend's code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return told(error)
    last = frames[-1]
    name = last.filename.replace("\\", "/").rsplit("/", 2)
    return f"{told(error)[:300]} (in {last.name}, {'/'.join(name[-2:])}:{last.lineno})"
