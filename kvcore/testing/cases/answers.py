"""What a declaration may answer, and what becomes of one that raises. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.errors import BackendError, Refusal
from kvcore.testing.cases.outcome import CheckFailure
from kvcore.testing.cases.refusal import raised


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
