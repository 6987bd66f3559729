"""The cases of all levels, generated from declared axes. Imports no torch.

Quick varies one axis at a time around the base, phases taking turns; fast is a covering set of it. Full gives every
value every phase that can show it, and adds combinations in which every pair of values of two axes meets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, cycle
from typing import Any

from kvcore.testing.cases import axes as ax
from kvcore.testing.cases.builder import CaseBuilder, claimed_blocks
from kvcore.testing.cases.case import LEVELS, Base, Case
from kvcore.testing.cases.covering import BUDGETS, cover
from kvcore.testing.cases.precision import precise
from kvcore.testing.cases.robust import level_3, level_4, level_5
from kvcore.testing.cases.sizes import sizes
from kvcore.testing.cases.write import level_0, level_1


def all_cases(level: str = "quick", base: Base | None = None, levels: Sequence[str] = LEVELS) -> list[Case]:
    """All cases.

    Args:
        level: ``fast``, ``quick`` or ``full``.
        base: The plainest problem that the backend takes.
        levels: Which of L0 to L5.

    Returns:
        Cases with distinct ids, in order of level.
    """
    return list(_all_cases(level, base or Base(), tuple(levels)))


@cache
def _all_cases(level: str, base: Base, levels: tuple[str, ...]) -> tuple[Case, ...]:
    maker = CaseBuilder(base)
    found: dict[str, Case] = {}
    makers = (level_0, level_1, level_2, level_3, level_4, level_5)
    for name, make in zip(LEVELS, makers, strict=True):
        if name not in levels:
            continue
        for case in make(maker):
            if case.tier == "quick" or level == "full":
                found.setdefault(case.id, case)
    cases = tuple(found.values())
    return tuple(cover(cases, BUDGETS["fast"])) if level == "fast" else cases


def level_2(m: CaseBuilder) -> Iterator[Case]:
    """Attention against the oracle."""
    for phase in ax.PHASES:
        yield m.attend("base", phase, profile="kv" if phase in ("prefill", "decode") else "")
        yield m.attend("layout=1", phase, layout=1, tier="quick" if phase in ("decode", "mixed") else "full")
    yield m.attend("shared", "mixed", variant="shared")
    yield m.attend("fused_inputs", "mixed", variant="fused")
    yield m.attend("block_size=1", "mixed", block_size=1)
    yield from claimed_blocks(m, "L2", "attend", "decode", "mixed")
    for phase in ("decode", "multi_token", "mixed"):
        yield m.latent("L2", "attend", phase, profile="latent", tier="quick" if phase == "decode" else "full")
    for axis, values in ax.sweeps(m.base).items():
        turns = cycle(ax.PHASES)
        for name, (changes, phases) in values.items():
            first = next(p for p in turns if p in phases)
            for phase in phases:
                quick = (phase == first or axis in ax.BOTH_WAYS) and axis not in ax.AT_FULL
                yield m.attend(f"{axis}={name}", phase, tier="quick" if quick else "full", **changes)
    yield from _windows(m)
    for name, changes in ax.COMBINED.items():
        for i, phase in enumerate(("mixed", "decode", "chunked")):
            yield m.attend(name, phase, tier="quick" if i == 0 else "full", **changes)
    yield from _quantized(m)
    yield from sizes(m)
    yield from precise(m)
    for i, changes in enumerate(pairwise(ax.pair_axes(m.base), seed=7)):
        yield m.attend(f"pairs{i}", changes.pop("phase"), tier="full", **changes)


def _windows(m: CaseBuilder) -> Iterator[Case]:
    """Windows of every length around a block, over the whole table and over the live tail."""
    turns = cycle(("decode", "chunked", "mixed"))
    for name, size in ax.windows(m.base.block_size).items():
        first = next(turns)
        for phase in ("decode", "chunked", "mixed", "multi_token"):
            for tail in (False, True):
                tier = "quick" if phase == first else "full"
                label = f"window={name}" + (".tail" if tail else "")
                yield m.attend(label, phase, window=size, window_name=name, own_retention=tail, tier=tier)


def _quantized(m: CaseBuilder) -> Iterator[Case]:
    for name, changes in ax.QUANTIZED.items():
        for i, scale in enumerate(ax.SCALES):
            other = ax.SCALES[(i + 1) % len(ax.SCALES)]
            for phase in ("mixed", "decode", "prefill"):
                tier = "quick" if phase == ("mixed", "decode", "prefill")[i] else "full"
                label = f"cache_dtype={name}.scale={scale}"
                yield m.attend(label, phase, k_scale=scale, v_scale=other, tier=tier, **changes)
        yield m.attend(f"cache_dtype={name}.window", "mixed", window=m.base.block_size + 1, **changes)
        yield m.attend(f"cache_dtype={name}.ratio", "decode", kernel_ratio=2, k_scale=0.3, **changes)


def pairwise(values: Mapping[str, Sequence[Mapping[str, Any]]], seed: int) -> list[dict[str, Any]]:
    """Rows in which every pair of values of every two axes meets at least once (greedy).

    Args:
        values: Per axis, the changes that each value makes to a case.
        seed: Of the candidates that are tried for a row.
    """
    rng, names = random.Random(seed), list(values)
    open_pairs = {
        (a, i, b, j) for a, b in combinations(names, 2) for i in range(len(values[a])) for j in range(len(values[b]))
    }
    rows = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        best: tuple[int, dict[str, int]] | None = None
        for _ in range(20):
            row = {n: rng.randrange(len(values[n])) for n in names} | {a: i, b: j}
            gain = len(open_pairs & _pairs(row, names))
            if best is None or gain > best[0]:
                best = (gain, row)
        if best is None:
            break
        open_pairs -= _pairs(best[1], names)
        changes: dict[str, Any] = {}
        for name, index in best[1].items():
            changes |= values[name][index]
        rows.append(changes)
    return rows


def _pairs(row: Mapping[str, int], names: Sequence[str]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}
