"""Small sets of cases: for the loop of editing, and for backends that are interpreted. Imports no torch.

What takes long is chosen by cost: whichever case brings the most checks, features and axis values that none before it
had, for what it costs, as long as the budget lasts. What that leaves out is told by `unasked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvcore.testing.cases.case import AXES, Case

# Sums of `Case.cost`: about 5 s of the torch backend, and about a minute (quick) of an interpreter on one core.
BUDGETS = {"fast": 12_000, "quick": 20_000, "full": 60_000}
# What any case costs an interpreter besides its tiles.
EACH = 100


def cover(cases: Sequence[Case], budget: int | None = None) -> list[Case]:
    """Cases that bring every check, feature and axis value, as far as the budget reaches: the most news for the cost.

    Level 0 costs nothing and is kept whole.

    Args:
        cases: What to choose from.
        budget: Most cost of all cases together; None is no limit.
    """
    kept = [c for c in cases if c.level == "L0"]
    seen = {fact for case in kept for fact in _facts(case)}
    spent, facts = 0, {c: _facts(c) - seen for c in cases if c.level != "L0"}
    # News only ever gets less, so that a case whose news was counted just now, and still is the most, is the best.
    waiting = [(-len(news) / (case.cost + EACH), case.id, case) for case, news in facts.items()]
    heapify(waiting)
    while waiting:
        told, name, case = heappop(waiting)
        news = facts[case] = facts[case] - seen
        worth = -len(news) / (case.cost + EACH)
        if not news or (budget is not None and spent + case.cost > budget):
            continue
        if worth > told:
            heappush(waiting, (worth, name, case))
            continue
        kept.append(case)
        spent += case.cost
        seen |= news
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
    found, whole, few = {}, [c.axes() for c in cases], [c.axes() for c in chosen]
    for axis in AXES:
        had = {str(mine[axis]).lower() for mine in few if axis in mine}
        values = dict.fromkeys(str(mine[axis]).lower() for mine in whole if axis in mine)
        missing = [v for v in values if v not in had]
        if missing:
            found[axis] = missing
    return found
