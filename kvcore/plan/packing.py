"""Where pages lie in the raw bytes under `packed`: large pages, which each group cuts into blocks of its own size.

large pages of M bytes:   group full    | 0  | 1  | 2  | 3  | ..
                          group window  |  0   |  1   |  2  | ..
A large page belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kvcore.plan.groups import ChosenClass
from kvcore.plan.placement import GROUP_OVERHEAD, MOST_GROUPS, GroupPlace
from kvcore.plan.rulers import Rulers, rulers
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.dtypes import ceil_div

# A group of states has a table of one column, and no attention is prepared for it.
STATE_GROUP_OVERHEAD = GROUP_OVERHEAD / 10
# Fractions of the largest block into which the groups may be cut.
PARTS = (2, 3, 4, 6)


@dataclass(frozen=True)
class PackedPlacement:
    """One arena measured with one ruler a group.

    Attributes:
        groups: One KV group for each class, or for each part of one.
        large_page_bytes: M.
        rulers: a_g, blocks of each group in a large page.
        cost: Relative: 1 for an arena and a step that lose nothing.
    """

    groups: tuple[GroupPlace, ...]
    large_page_bytes: int
    rulers: tuple[int, ...]
    cost: float

    def units(self, memory_bytes: int) -> int:
        """Large pages that fit in `memory_bytes`."""
        return memory_bytes // self.large_page_bytes

    def block_stride(self, group: int) -> int:
        """Bytes of one block of a group, padding included."""
        return self.large_page_bytes // self.rulers[group]


def packings(chosen: Sequence[ChosenClass]) -> list[PackedPlacement]:
    """The ways to cut large pages, the cheapest first: one KV group a class, or more groups and smaller pages."""
    found = {_in_parts(chosen, 1): None}
    if len(chosen) < MOST_GROUPS:
        found |= {_in_parts(chosen, parts): None for parts in PARTS}
        found |= {_in_pieces(chosen, c.page_bytes * len(c.members.cache_ids)): None for c in chosen}
    drafts = [_placed(groups) for groups in found if len(groups) <= max(MOST_GROUPS, len(chosen))]
    # Ties go to fewer groups.
    return sorted(drafts, key=lambda d: (d.cost, len(d.groups)))


def _in_parts(chosen: Sequence[ChosenClass], parts: int) -> tuple[GroupPlace, ...]:
    """The classes whose block passes 1 / `parts` of the largest one, cut evenly into groups of fewer layers."""
    largest = max(c.page_bytes * len(c.members.cache_ids) for c in chosen)
    groups = []
    for c in chosen:
        ids = c.members.cache_ids
        pieces = min(len(ids), ceil_div(c.page_bytes * len(ids) * parts, largest))
        groups += _cut(c, [i * len(ids) // pieces for i in range(pieces + 1)])
    return tuple(groups)


def _in_pieces(chosen: Sequence[ChosenClass], target: int) -> tuple[GroupPlace, ...]:
    """Groups of as many layers as fill `target` bytes, and of divisors of that number for those that are left."""
    groups = []
    for c in chosen:
        left = len(c.members.cache_ids)
        size, bounds = min(left, max(1, target // c.page_bytes)), [0]
        while left:
            piece = next(k for k in range(size, 0, -1) if size % k == 0 and k <= left)
            bounds.append(bounds[-1] + piece)
            left -= piece
        groups += _cut(c, bounds)
    return tuple(groups)


def _cut(c: ChosenClass, bounds: Sequence[int]) -> list[GroupPlace]:
    ids: tuple[CacheId, ...] = c.members.cache_ids
    return [GroupPlace(c, ids[a:b]) for a, b in pairwise(bounds)]


def _placed(groups: tuple[GroupPlace, ...]) -> PackedPlacement:
    cut = _rulers(tuple((g.chosen.page_bytes * len(g.cache_ids), g.chosen.stride_unit) for g in groups))
    states = sum(g.chosen.members.spec.content.per_request for g in groups)
    overhead = GROUP_OVERHEAD * (len(groups) - states) + STATE_GROUP_OVERHEAD * states
    return PackedPlacement(groups, cut.large_page_bytes, cut.counts, (1 + cut.cost) * (1 + overhead))


@lru_cache(maxsize=256)
def _rulers(blocks: tuple[tuple[int, int], ...]) -> Rulers:
    """The cut of blocks of so many bytes and stride units; the ranks and lengths of a sweep ask for the same ones."""
    return rulers([need for need, _ in blocks], [unit for _, unit in blocks])
