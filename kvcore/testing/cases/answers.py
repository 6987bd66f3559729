"""What a declaration may answer, refusals that must be seen to happen, and exceptions in one line."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvcore.errors import BackendError, BackendUnsupportedError, KVCoreError, Refusal
from kvcore.registry.choice import BackendChoice
from kvcore.registry.registry import Registry, told
from kvcore.registry.select import choose_backends
from kvcore.spec.cache_spec import CacheId
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CellResult, CheckFailure
from kvcore.testing.cases.planning import Target


@contextmanager
def asking() -> Iterator[None]:
    """Around questions to a declaration: whatever it raises, `SystemExit` included, is one typed error.

    Raises:
        BackendError: It raised, or what it answered is no answer.
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except CheckFailure as failure:
        raise BackendError(str(failure)) from failure
    except BaseException as error:
        raise BackendError(f"the declaration raised {raised(error)}") from error


def well_formed(answer: object, what: str) -> None:
    """Raise `CheckFailure` unless `answer` is None or a complete refusal."""
    if answer is None:
        return
    if not isinstance(answer, Refusal):
        raise CheckFailure(f"{what} answered {answer!r}, not None or Refusal")
    if not isinstance(answer.field, str) or not answer.field:
        raise CheckFailure(f"{what}: the refusal names no field")
    if answer.allowed is None:
        raise CheckFailure(f"{what}: the refusal of {answer.field} does not say what is allowed")


def reasoned(answer: object, what: str) -> str | None:
    """The reason why something is missing, or None.

    Raises:
        CheckFailure: Neither; a skip without a reason would hide that nothing was run.
    """
    if answer is None or (isinstance(answer, str) and answer.strip()):
        return answer
    raise CheckFailure(f"{what} answered {answer!r}, not None or a reason")


def timed(action: Callable[[], CellResult]) -> CellResult:
    """The result with its wall time."""
    begun = time.perf_counter()
    result = action()
    return replace(result, seconds=time.perf_counter() - begun)


def seen_to_refuse(target: Target, case: Case) -> None:
    """The refusal happens where an engine asks, before anything is made.

    Raises:
        CheckFailure: Selection takes the backend all the same.
    """
    registry = Registry()
    registry.backends[target.spec.name] = target.spec
    asked = {CacheId(i): c for i, c in enumerate(case.asked())}
    choice = BackendChoice(target.spec.name, options={target.spec.name: target.options})
    try:
        choose_backends(
            {cache: c.cache_spec() for cache, c in asked.items()},
            {cache: c.query() for cache, c in asked.items()},
            target.facts,
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
