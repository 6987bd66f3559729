"""Small sets of cases: for the loop of editing, and for backends that are interpreted. Imports no torch.

What takes long is chosen by cost: cheapest first, each case that brings a check, feature or axis value which none
before it had, as long as the budget lasts. What that leaves out is told by `unasked`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.testing.cases.case import AXES, Case

# Sums of `Case.cost`: about 5 s of the torch backend, and about a minute (quick) of an interpreter on one core.
BUDGETS = {"fast": 12_000, "quick": 20_000, "full": 60_000}


def cover(cases: Sequence[Case], budget: int | None = None) -> list[Case]:
    """The cheapest cases that bring every check, feature and axis value, as far as the budget reaches.

    Level 0 costs nothing and is kept whole.

    Args:
        cases: What to choose from.
        budget: Most cost of all cases together; None is no limit.
    """
    kept, seen, spent = list[Case](), set[tuple[str, str]](), 0
    for case in sorted(cases, key=lambda c: (c.level != "L0", c.cost, c.id)):
        facts = _facts(case)
        if case.level != "L0":
            if not facts - seen or (budget is not None and spent + case.cost > budget):
                continue
            spent += case.cost
        kept.append(case)
        seen |= facts
    return sorted(kept, key=lambda c: c.level)


def _facts(case: Case) -> set[tuple[str, str]]:
    """What a case is the first to ask, if it is."""
    # Of a value over latents nothing follows for KV heads, which other backends serve.
    axes = {axis: value for axis, value in case.axes().items() if axis != "block_size"}
    facts = {(axis, f"{value} {case.stores}") for axis, value in axes.items()}
    facts |= {("check", f"{case.level} {case.check}"), ("layout", str(case.layout))}
    facts |= {("attend", case.dtype)} if (case.level, case.check) == ("L2", "attend") else set()
    facts |= {("poison", case.poison), ("placement", case.placement), ("neighbour", case.neighbour)}
    facts |= {("variant", case.variant), ("tail", str(case.own_retention)), ("lse", str(case.lse))}
    return facts


def unasked(cases: Sequence[Case], chosen: Sequence[Case]) -> dict[str, list[str]]:
    """Per axis, the values that some case has and no chosen one."""
    found = {}
    for axis in AXES:
        had = {str(c.axes()[axis]).lower() for c in chosen if axis in c.axes()}
        values = dict.fromkeys(str(c.axes()[axis]).lower() for c in cases if axis in c.axes())
        missing = [v for v in values if v not in had]
        if missing:
            found[axis] = missing
    return found
