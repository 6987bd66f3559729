"""What a cell of the kit can say: one case on one backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from kvcore.errors import Refusal

Outcome = Literal["passed", "failed", "unsupported", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "unsupported", "skipped")
# Strongest proof first; the last two never count as proven.
PROOFS = ("device", "interpreter", "host", "emulated")
# Of a backend whose library or device is missing: nothing but its declaration was asked.
DECLARED = "declared"
STRENGTH = (*PROOFS, DECLARED)
PROVEN = frozenset(("device", "interpreter"))


class CheckFailure(Exception):
    """The backend is wrong; the text says how.

    Attributes:
        error, tolerance: The worst element, where the answer was compared.
    """

    def __init__(self, reason: str, *, error: float | None = None, tolerance: float | None = None) -> None:
        super().__init__(reason)
        self.error = error
        self.tolerance = tolerance


class CannotJudge(Exception):
    """The case says nothing about the backend here; the text says why."""


class Refused(Exception):
    """The backend, or the plan for it, says that it cannot serve a case."""

    def __init__(self, field: str, got: object, allowed: object) -> None:
        self.refusal = Refusal(field, got, allowed)
        super().__init__(str(self.refusal))


@dataclass(frozen=True)
class Measure:
    """The worst element of a comparison.

    Attributes:
        error: Its absolute error.
        tolerance: What was allowed there.
    """

    error: float = 0.0
    tolerance: float = 0.0

    @property
    def ratio(self) -> float:
        """Error as a share of what is allowed; 0 where nothing was compared by tolerance."""
        if self.tolerance > 0:
            return self.error / self.tolerance
        return 0.0 if self.error == 0 else math.inf

    def worse(self, other: Measure) -> Measure:
        """The worse of two."""
        return self if self.ratio >= other.ratio else other


@dataclass(frozen=True)
class CellResult:
    """One case on one backend.

    Attributes:
        case: The case (`kvcore.testing.cases.case.Case`).
        backend: Name of the backend.
        outcome: passed, failed, unsupported (declared, and seen to refuse) or skipped (cannot run here).
        proof: device, interpreter, host or emulated; what the run proves. ``declared`` where no kernel can run.
        reason: Why it is not passed; None for passed.
        error, tolerance: The worst element, where something was compared.
        understated: A refused case that would have been right.
        seconds: Wall time.
        after: Of a failure, the cases that the same instance of the backend had run before, in their order.
    """

    case: Any
    backend: str
    outcome: Outcome
    proof: str
    reason: str | None = None
    error: float | None = None
    tolerance: float | None = None
    understated: bool = False
    seconds: float = 0.0
    after: tuple[Any, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether it passed with a proof that counts."""
        return self.outcome == "passed" and self.proof in PROVEN

    def as_dict(self) -> dict[str, Any]:
        """The entry of `cases` in the JSON document of `kvcore conform`."""
        return {
            "id": self.case.id,
            "backend": self.backend,
            "level": self.case.level,
            "proof": self.proof,
            "outcome": self.outcome,
            "proven": self.proven,
            "reason": self.reason,
            "max_abs_error": self.error,
            "tolerance": self.tolerance,
            "understated": self.understated,
            "seconds": round(self.seconds, 4),
            "axes": self.case.axes(),
        }
