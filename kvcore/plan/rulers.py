"""Rulers: into how many blocks of each group a large page is cut, so that next to nothing is padding.

    large page of M bytes   |           260 layer pages            |
    group of 10 layers      | 0 | 1 | 2 | 3 |  ...           | 25 |   a = 26, stride M / 26
    group of 52 layers      |   0   |   1   |   2   |  3   |   4   |   a = 5,  stride M / 5

M is a multiple of every stride, and every stride of its group's alignment. The least common multiple of the
blocks' bytes needs no padding at all and is often absurd (22 GiB for a Mamba hybrid); near it, and near small
multiples of the largest block, there are pages that waste a few thousandths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from kvcore.plan.config import ARENA_ALIGNMENT
from kvcore.spec.dtypes import round_up

# An arena is assumed to hold so many of the largest blocks, and never to be larger than this: never the given one, so
# that more memory does not change the shape of the plan, and capacity stays monotonic.
REFERENCE_BLOCKS = 4096
REFERENCE_BYTES = 16 << 30
# Pages that are tried: multiples of a block, up to so many of the largest.
MULTIPLES = range(1, 33)
# With more unlike groups than this, cuts are smooth numbers alone: their least common multiple stays small.
MOST_UNLIKE = 8
SMOOTH = tuple(sorted(2**i * 3**j for i in range(13) for j in range(3)))
# Partial choices kept while the groups are gone through.
BEAM = 12


@dataclass(frozen=True)
class Rulers:
    """How large pages are cut.

    Attributes:
        large_page_bytes: M.
        counts: a_g, blocks of each group in a large page.
        cost: Share of an arena lost by the group that fares worst, half a large page a group and large page 0.
    """

    large_page_bytes: int
    counts: tuple[int, ...]
    cost: float


def least_page(needs: Sequence[int], units: Sequence[int], counts: Sequence[int]) -> int:
    """The smallest large page that `counts` cut into blocks of at least `needs` bytes.

    Ranks that hold other layers of the same groups use the same counts, each with its own page.

    Args:
        needs: Bytes of a block of each group.
        units: Each group's stride is a multiple of this.
        counts: Blocks of each group in a large page.
    """
    step = lcm(ARENA_ALIGNMENT, *(a * u for a, u in zip(counts, units, strict=True)))
    return round_up(max(a * n for a, n in zip(counts, needs, strict=True)), step)


def rulers(needs: Sequence[int], units: Sequence[int]) -> Rulers:
    """The cut of least cost: worst padding of a group, plus half a large page a group and large page 0.

    Args:
        needs: Bytes of a block of each group, at least one group.
        units: Each group's stride is a multiple of this.
    """
    return _rulers(tuple(needs), tuple(units))


@lru_cache(maxsize=64)  # placements are compared at several lengths, and mostly ask for the same cut
def _rulers(needs: tuple[int, ...], units: tuple[int, ...]) -> Rulers:
    kinds = list(dict.fromkeys(zip(needs, units, strict=True)))
    largest = max(needs)
    reference = min(REFERENCE_BYTES, REFERENCE_BLOCKS * largest)
    pages = {largest * k for k in MULTIPLES}
    if len(kinds) <= MOST_UNLIKE:
        others = {need * k for need in needs for k in MULTIPLES}
        pages |= {page for page in (*others, lcm(*needs)) if largest <= page <= largest * max(MULTIPLES)}
    best: tuple[float, int, tuple[int, ...]] | None = None
    for target in sorted(pages):
        lost = (len(needs) / 2 + 1) * target / reference
        if best is not None and lost >= best[0]:
            break  # larger pages only lose more
        for counts in _cuts(kinds, target):
            page = least_page([n for n, _ in kinds], [u for _, u in kinds], counts)
            padding = max(1 - a * n / page for a, (n, _) in zip(counts, kinds, strict=True))
            cost = padding + (len(needs) / 2 + 1) * page / reference
            if best is None or (cost, page) < best[:2]:
                best = (cost, page, counts)
    cost, page, counts = best or (0.0, 0, ())  # the largest block itself is always a target
    by_kind = dict(zip(kinds, counts, strict=True))
    return Rulers(page, tuple(by_kind[kind] for kind in zip(needs, units, strict=True)), cost)


def _cuts(kinds: Sequence[tuple[int, int]], target: int) -> Iterable[tuple[int, ...]]:
    """Counts with which a page of about `target` bytes is cut with little padding and a small common step."""
    if len(kinds) > MOST_UNLIKE:
        return [tuple(max(a for a in SMOOTH if a == 1 or a * n <= target) for n, _ in kinds)]
    partial: list[tuple[int, tuple[int, ...]]] = [(ARENA_ALIGNMENT, ())]
    for need, unit in kinds:
        most = target // need
        options = {most} | {most - most % t for t in (2, 4, 8, 16, 32, 64, 128) if t * 16 <= most}
        grown = [(lcm(step, a * unit), (*counts, a)) for step, counts in partial for a in options]
        partial = sorted(grown, key=lambda g: (round_up(target, g[0]), [-a for a in g[1]]))[:BEAM]
    return [counts for _, counts in partial]
