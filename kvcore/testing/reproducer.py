"""A failure as Python to paste, made as small as it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvcore.spec.dtypes import ceil_div
from kvcore.testing.cases import Case, Seq
from kvcore.testing.outcome import CellResult


def smallest(failed: Sequence[CellResult]) -> CellResult:
    """The failed cell of the lowest level, and of those the cheapest."""
    return min(failed, key=lambda r: (r.case.level, r.case.cost, r.case.tokens, r.case.id))


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 40) -> Case:
    """A smaller case that fails as well: fewer sequences, shorter ones, fewer heads.

    Args:
        case: A case that fails.
        fails: Runs a case.
        tries: Most cases to run.
    """
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for other in _smaller(case):
            left -= 1
            if left < 0:
                break
            if fails(other):
                case, smaller = other, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    seqs = case.seqs
    if len(seqs) > 1 and not any(s.shared for s in seqs) and case.check not in ("merge", "steps"):
        for i in range(len(seqs)):
            yield replace(case, seqs=seqs[:i] + seqs[i + 1 :])
    for i, seq in enumerate(seqs):
        if seq.shared or (i + 1 < len(seqs) and seqs[i + 1].shared):
            continue
        halves = [Seq(seq.computed, ceil_div(seq.scheduled, 2)), Seq(seq.computed // 2, seq.scheduled)]
        for half in halves:
            if half != seq and (seq.computed == 0 or half.computed > 0):
                yield replace(case, seqs=(*seqs[:i], half, *seqs[i + 1 :]))
    if case.layers > 1:
        yield replace(case, layers=1)
    if case.num_kv_heads > 1:
        yield replace(case, num_kv_heads=1)


def source(result: CellResult, case: Case | None = None, spec: object = None) -> str:
    """Python that runs one failed cell again.

    Args:
        result: The failed cell.
        case: A smaller case in its place.
        spec: The declaration, where the backend is not installed under its name.
    """
    lines, backend = [], repr(result.backend)
    if isinstance(spec, type):
        lines.append(f"from {spec.__module__} import {spec.__qualname__}\n")
        backend = spec.__qualname__
    return (
        "from kvcore.testing import Case, Seq, run\n"
        + "".join(lines)
        + f"\ncase = {(case or result.case).source()}\n"
        + f"for result in run({backend}, [case]):\n"
        + "    print(result.outcome, result.reason)\n"
    )
