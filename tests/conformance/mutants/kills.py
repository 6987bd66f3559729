"""`Kill`: what kills a mutant: a case, levels, axes; and how each is found out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict

from kvcore.attention.declaration import BackendSpec
from kvcore.testing import Case, run
from kvcore.testing.cases.case import LEVELS
from kvcore.testing.report.matrix import shown

from .mutant import Mutant, catalogue

MATRIX = Path(__file__).with_name("kill_matrix.json")
LEVEL_0 = "L0"


class Kill(TypedDict):
    """What kills a mutant.

    Attributes:
        case: The first case of its own level.
        levels: Every level with a quick case that does.
        axes: The axes by each of which alone it dies at level quick; absent where that was not found out yet.
    """

    case: str
    levels: list[str]
    axes: NotRequired[list[str]]


def recorded() -> dict[str, Kill]:
    """The matrix as it was last written."""
    found: dict[str, Kill] = json.loads(MATRIX.read_text())
    return found


def find(mutant: Mutant, spec: type[BackendSpec]) -> Kill:
    """Run what it takes; minutes for a mutant that few cases notice."""
    return Kill(**find_levels(mutant, spec), axes=axes_alone(mutant, spec))


def find_levels(mutant: Mutant, spec: type[BackendSpec]) -> Kill:
    """The same without the axes, which is what takes long."""
    case, others = first_kill(mutant, spec)[0], tuple(n for n in LEVELS if n != mutant.level)
    levels = killing_levels(spec, "quick", others) + [mutant.level] * bool(case)
    return Kill(case=case, levels=sorted(levels))


def first_kill(mutant: Mutant, spec: type[BackendSpec]) -> tuple[str, str]:
    """Id of the first selected case that fails, and the reason; empty when all pass."""
    results = run(spec, mutant.selected(), stop_at_first=True)
    return next(((r.case.id, r.reason or "") for r in results if r.outcome == "failed"), ("", ""))


def killing_levels(
    spec: type[BackendSpec],
    tier: str = "full",
    levels: tuple[str, ...] = LEVELS,
    pick: Callable[[Sequence[Case]], Sequence[Case]] = list,
) -> list[str]:
    """The levels in which some case fails, under the options as given; each stops at its first.

    Args:
        spec: The mutant.
        tier: ``quick`` leaves out the cases of level full.
        levels: Which levels to try.
        pick: Which of their cases.
    """
    found = []
    for level in levels:
        cases = [c for c in catalogue() if c.level == level and (tier == "full" or c.tier == "quick")]
        if any(r.outcome == "failed" for r in run(spec, pick(cases), stop_at_first=True, probe_refused=False)):
            found.append(level)
    return found


def axes_alone(mutant: Mutant, spec: type[BackendSpec]) -> list[str]:
    """The axes by each of which alone a mutant dies at level quick.

    It does when every case that notices it has a value of the axis which the plainest cases (L2.attend.base) lack: a
    kit without those values would call it right.
    """
    if mutant.level == LEVEL_0:
        return []  # judged by declarations, which have no axes
    first = mutant.selected()
    left: set[str] | None = None
    for case in sorted(quick_cases(mutant.victim), key=lambda c: (c not in first, len(beyond(c)), c.cost)):
        if left is not None and left <= beyond(case):
            continue  # it has a value of each of them, and could take none away
        if any(r.outcome == "failed" for r in run(spec, [case], probe_refused=False)):
            left = beyond(case) if left is None else left & beyond(case)
            if not left:
                break
    return sorted(left or ())


@cache
def quick_cases(victim: str = "victim") -> tuple[Case, ...]:
    """Those of level quick that run a step."""
    return tuple(c for c in catalogue(victim) if c.seqs and c.tier == "quick")


def is_plainest(case: Case) -> bool:
    """Whether a case varies nothing but the shape of its step."""
    return case.id.startswith("L2.attend.base.")


@cache
def plain(axis: str) -> frozenset[str]:
    """The values that the plainest cases have."""
    return frozenset(shown(_asks(c)[axis]) for c in quick_cases() if is_plainest(c) and axis in _asks(c))


@cache
def beyond(case: Case) -> frozenset[str]:
    """The axes along which a case, or a layer beside it, asks something else than the plainest do."""
    asked = [(axis, value) for layer in (case, *case.asked()) for axis, value in _asks(layer).items()]
    return frozenset(axis for axis, value in asked if axis != "profile" and shown(value) not in plain(axis))


def _asks(case: Case) -> dict[str, object]:
    """The axes; groups by their size, because large cases have one KV head for speed alone."""
    return case.axes() | {"gqa": case.gqa}
