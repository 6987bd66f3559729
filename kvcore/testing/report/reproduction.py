"""A failure made again on a fresh instance of the backend, and made as small as it gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvcore.spec.dtypes import ceil_div
from kvcore.testing.cases.case import Case, Seq
from kvcore.testing.cases.outcome import CellResult

# Runs cases on one fresh instance; of each the reason why it fails, or None.
Reasons = Callable[[Sequence[Case]], Sequence[str | None]]
# How often a case has to fail to count as steady, and how often it is run for a fault that comes and goes.
STEADY, REPEATS = 3, 32
# What a case is without a feature, largest savings first.
_PLAIN: dict[str, object] = {
    "layers": 1,
    "neighbour": "",
    "num_kv_heads": 1,
    "gqa": 1,
    "placement": "slots",
    "window": None,
    "chunk": None,
    "own_retention": False,
    "softcap": None,
    "alibi": False,
    "sinks": False,
    "scale": None,
    "lse": False,
    "variant": "",
}


class Reproduction(NamedTuple):
    """Cases that fail when they run one after the other on a fresh instance.

    Attributes:
        cases: The last one fails.
        note: What is to be known of it, in a sentence, or "".
    """

    cases: tuple[Case, ...]
    note: str = ""


def reproduce(result: CellResult, reasons: Reasons, *, smaller: bool, seconds: float = 20.0) -> Reproduction:
    """How a failed cell fails again, on a fresh instance of the backend.

    Args:
        result: The failed cell.
        reasons: Runs cases.
        smaller: Whether to look for a smaller case.
        seconds: Most time; what was found until then counts.
    """
    until = time.monotonic() + seconds
    case, like = result.case, alike(str(result.reason))

    def ends(cases: Sequence[Case]) -> list[bool]:
        """Of each case, whether it fails as the cell did."""
        return [alike(r or "") == like for r in reasons(cases)] if time.monotonic() < until else [False]

    def steady(cases: Sequence[Case]) -> bool:
        return all(ends(cases)[-1] for _ in range(STEADY))

    if steady([case]):
        least = shrink(case, lambda c: ends([c])[-1]) if smaller else case
        return Reproduction((least if least == case or steady([least]) else case,))
    before = shortest(list(result.after), lambda cases: ends([*cases, case])[-1])
    if before and steady([*before, case]):
        what = "the case before it" if len(before) == 1 else f"the {len(before)} cases before it"
        note = f"The last case fails only after {what}, on the same instance: the backend keeps something."
        return Reproduction((*before, case), note)
    if any(ends([case] * REPEATS)):
        return Reproduction((case,) * REPEATS, "The fault comes and goes: the same case is run several times.")
    if time.monotonic() >= until:
        return Reproduction((case,), "Not tried again: there were too many failures for that.")
    count = len(result.after)
    return Reproduction((case,), f"It did not fail again, alone or after the {count} cases that ran before it.")


def alike(reason: str) -> str:
    """The kind of a failure: its first words, which hold no numbers."""
    return " ".join(reason.split()[:3])


def shortest(before: list[Case], fails: Callable[[Sequence[Case]], bool]) -> list[Case]:
    """The fewest of the cases before a failure that bring it about; none where they do not.

    First the last 1, 2, 4, ... of them, then without one after the other.
    """
    size = 1
    while before and not fails(before[-size:]):
        if size >= len(before):
            return []
        size *= 2
    kept = before[-size:]
    for case in list(kept) if len(kept) > 1 else ():
        without = [c for c in kept if c is not case]
        if without and fails(without):
            kept = without
    return kept


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 60) -> Case:
    """A smaller case that fails as well: fewer sequences, shorter ones, fewer heads, fewer features.

    Args:
        case: A case that fails.
        fails: Runs a case.
        tries: Most cases to run.

    Returns:
        The case as it is where it has no step: it is as small as it gets.
    """
    left = tries
    found = True
    while found and left > 0:
        found = False
        for other in _smaller(case):
            left -= 1
            if left < 0:
                break
            if fails(other):
                case, found = other, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    seqs = case.seqs
    if not seqs:
        return
    if len(seqs) > 1 and not any(s.shared for s in seqs) and case.check not in ("merge", "steps"):
        half = len(seqs) // 2
        halves = [seqs[:half], seqs[half:]] if len(seqs) > 3 else []
        for fewer in [*halves, *(seqs[:i] + seqs[i + 1 :] for i in range(len(seqs)))]:
            yield replace(case, seqs=fewer)
    for i, seq in enumerate(seqs):
        if seq.shared or (i + 1 < len(seqs) and seqs[i + 1].shared):
            continue
        shorter = [Seq(seq.computed, ceil_div(seq.scheduled, 2)), Seq(seq.computed // 2, seq.scheduled)]
        for other in shorter:
            if other != seq and (seq.computed == 0 or other.computed > 0):
                yield replace(case, seqs=(*seqs[:i], other, *seqs[i + 1 :]))
    for name, plain in _PLAIN.items():
        asked_for = name == "lse" and case.check == "merge"
        if getattr(case, name) != plain and not asked_for and case.stores == "kv":
            yield replace(case, **{name: plain})  # type: ignore[arg-type]
