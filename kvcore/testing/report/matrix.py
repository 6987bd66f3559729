"""`MatrixCell`: what one value of one axis came to on one backend."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcore.testing.cases.case import AXES
from kvcore.testing.cases.outcome import OUTCOMES, PROVEN, STRENGTH, CellResult, Outcome

# The worst says most: one failure spoils a value, one pass proves that it is served.
_ORDER: tuple[Outcome, ...] = ("failed", "passed", "unsupported", "skipped")
LEVEL = "level"


@dataclass(frozen=True)
class MatrixCell:
    """One value of one feature on one backend.

    Attributes:
        feature, value: The axis and its value.
        backend: The backend.
        outcome: The worst of its cases, where a pass outweighs a refusal of another feature.
        proof: The weakest proof of the cases that passed, else of all.
        cases: How many cases stand behind it.
        counts: How many of them have each outcome.
    """

    feature: str
    value: str
    backend: str
    outcome: Outcome
    proof: str
    cases: int
    counts: dict[Outcome, int]

    @property
    def proven(self) -> bool:
        """Whether it passed with a proof that counts."""
        return self.outcome == "passed" and self.proof in PROVEN

    def as_dict(self) -> dict[str, Any]:
        """The entry of `matrix`."""
        return {**asdict(self), "proven": self.proven}


def matrix(results: Sequence[CellResult]) -> list[MatrixCell]:
    """Feature by value by backend; beside the axes, one row a level."""
    return [_cell(*key, found) for key, found in by_cell(results).items()]


def by_cell(results: Sequence[CellResult]) -> dict[tuple[str, str, str], list[CellResult]]:
    """The results behind each (feature, value, backend), in the order in which they are shown."""
    found: dict[tuple[str, str, str], list[CellResult]] = {}
    for result in results:
        features = {LEVEL: result.case.level} | result.case.axes()
        for name, value in features.items():
            found.setdefault((name, shown(value), result.backend), []).append(result)
    order = {name: i for i, name in enumerate((LEVEL, *AXES))}
    return dict(sorted(found.items(), key=lambda item: (order[item[0][0]], natural(item[0][1]))))


def is_size(values: Sequence[str]) -> bool:
    """Whether an axis is a size: most of its values are numbers, or ranges of them."""
    return 2 * sum(natural(v)[0] == 0 for v in values) > len(values)


def _cell(feature: str, value: str, backend: str, results: Sequence[CellResult]) -> MatrixCell:
    outcome = next(o for o in _ORDER if any(r.outcome == o for r in results))
    proofs = [r.proof for r in results if r.outcome == outcome]
    counts = {name: sum(r.outcome == name for r in results) for name in OUTCOMES}
    return MatrixCell(feature, value, backend, outcome, max(proofs, key=STRENGTH.index), len(results), counts)


def shown(value: object) -> str:
    """A value of an axis, as it is typed in `where.<axis>=`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def natural(text: str) -> tuple[int, float, str]:
    """Numbers and ranges by where they begin, then words."""
    begins = re.match(r"[0-9]+(\.[0-9]+)?", text)
    return (1, 0.0, text) if begins is None else (0, float(begins[0]), text)
