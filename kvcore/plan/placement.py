"""Where pages lie in the raw bytes under `slots`: layer-major, in tensors that the groups share; see also `packing`.

group width 2: L0, L2 full; L1, L3 window
  tensor 0  | block 0 | block 1 | ...  L0 and L1
  tensor 1  | block 0 | block 1 | ...  L2 and L3
A block id belongs to one group at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from kvcore.plan.capacity import Limits
from kvcore.plan.config import slots_bytes
from kvcore.plan.groups import ChosenClass
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.dtypes import ceil_div, round_up

# Each group costs its own metadata and table every step. 46 groups of one layer were reported to
# halve decode speed (vllm-project/vllm#51742): 1 / 45 of a step for each group beyond the first.
GROUP_OVERHEAD = 1 / 45
# More groups than this are never chosen, unless the model has more unlike kinds of caches.
MOST_GROUPS = 8
# The lengths at which widths are compared before one is chosen for the length that is planned.
LADDER = tuple(2**i for i in range(6, 21, 2))


@dataclass(frozen=True)
class GroupPlace:
    """One KV group before it is numbered: its class and the caches that fell to it."""

    chosen: ChosenClass
    cache_ids: tuple[CacheId, ...]


@dataclass(frozen=True)
class SlotsPlacement:
    """Groups and the strides of the shared tensors.

    Attributes:
        groups: The KV groups.
        strides: Bytes of one block in each tensor; as many as the widest group has layers.
    """

    groups: tuple[GroupPlace, ...]
    strides: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id in all tensors."""
        return sum(self.strides)

    def units(self, memory_bytes: int) -> int:
        """Most ids for which all tensors, each starting on a multiple of 256, fit in `memory_bytes`."""
        count = memory_bytes // self.bytes_per_block
        while count > 0 and self.arena_bytes(count) > memory_bytes:
            count -= 1
        return max(count, 0)

    def arena_bytes(self, num_blocks: int) -> int:
        """Bytes of the arena for `num_blocks` ids."""
        return slots_bytes(self.strides, num_blocks)

    def sharers(self, tensor: int) -> tuple[CacheId, ...]:
        """The caches that lie in a tensor: the i-th layer of every group."""
        return tuple(g.cache_ids[tensor] for g in self.groups if tensor < len(g.cache_ids))


def slots(chosen: Sequence[ChosenClass], limits: Limits) -> SlotsPlacement:
    """The group width with which one sequence of `max_model_len` tokens needs the fewest bytes.

    Widths that buy their bytes with too many groups, at any length, are left out before the length is asked. So what
    one sequence needs is the least of some functions that grow with its length, and grows with it too.
    """
    # Only where some class falls into another number of groups does a width make a difference.
    lengths = {len(c.members.cache_ids) for c in chosen}
    widths = sorted({ceil_div(n, parts) for n in lengths for parts in range(1, n + 1)}, reverse=True)
    cost = SlotsCost(chosen)
    groups = {width: cost.groups(width) for width in widths}
    most = max(MOST_GROUPS, min(groups.values()))
    kept = _worth_their_groups(cost, [w for w in widths if groups[w] <= most])
    # Ties go to the wider groups: fewer tables.
    return _slots_of_width(chosen, min(kept, key=lambda width: (cost.needed(width, limits), groups[width])))


def _worth_their_groups(cost: SlotsCost, widths: Sequence[int]) -> list[int]:
    """The widths but those whose groups cost more than they save beside one of fewer groups, at all lengths."""
    ladder = [Limits(length) for length in LADDER]
    needed = {w: [cost.needed(w, limits, null=False) for limits in ladder] for w in widths}
    count = {w: cost.groups(w) for w in widths}

    def beaten(w: int, by: int) -> bool:
        dearer = 1 + GROUP_OVERHEAD * (count[w] - count[by])
        return count[by] < count[w] and all(b <= a * dearer for a, b in zip(needed[w], needed[by], strict=True))

    return [w for w in widths if not any(beaten(w, by) for by in widths)]


def _slots_of_width(chosen: Sequence[ChosenClass], width: int) -> SlotsPlacement:
    groups = []
    for c in chosen:
        ids = c.members.cache_ids
        parts = ceil_div(len(ids), width)
        bounds = [i * len(ids) // parts for i in range(parts + 1)]
        groups += [GroupPlace(c, ids[a:b]) for a, b in pairwise(bounds)]
    pages = [(len(g.cache_ids), g.chosen.page_bytes) for g in groups]
    strides = [s for count, s in _strides(pages, _stride_unit(chosen)) for _ in range(count)]
    return SlotsPlacement(tuple(groups), tuple(strides))


def _stride_unit(chosen: Sequence[ChosenClass]) -> int:
    return lcm(*(c.stride_unit for c in chosen))


def _strides(groups: Iterable[tuple[int, int]], unit: int) -> list[tuple[int, int]]:
    """(how many tensors, their stride), in order: tensor i is as wide as the largest page of a group that reaches it.

    Args:
        groups: Layers and page bytes of each group.
        unit: Strides are multiples of this.
    """
    largest: dict[int, int] = {}
    for length, page in groups:
        largest[length] = max(page, largest.get(length, 0))
    runs, page = [], 0
    lengths = sorted(largest, reverse=True)
    for length, shorter in zip(lengths, [*lengths[1:], 0], strict=True):
        page = max(page, largest[length])
        runs.append((length - shorter, round_up(page, unit)))
    return runs[::-1]


class SlotsCost:
    """What a group width costs, without making the groups: classes that count alike are counted together."""

    def __init__(self, chosen: Sequence[ChosenClass]) -> None:
        self._unit = _stride_unit(chosen)
        self._classes = Counter(
            (len(c.members.cache_ids), c.page_bytes, c.members.spec.retention, c.block_size) for c in chosen
        )

    def groups(self, width: int) -> int:
        """Groups at this width."""
        return sum(count * ceil_div(length, width) for (length, *_), count in self._classes.items())

    def needed(self, width: int, limits: Limits, *, null: bool = True) -> int:
        """Bytes of one sequence at its largest step, with or without the null block."""
        scheduled = min(limits.max_model_len, limits.max_num_batched_tokens)
        blocks, pages = int(null), []
        for (length, page, retention, size), count in self._classes.items():
            parts = ceil_div(length, width)
            pages.append((ceil_div(length, parts), page))
            blocks += count * parts * retention.blocks_for_step(limits.max_model_len, scheduled, size)
        return blocks * sum(count * stride for count, stride in _strides(pages, self._unit))
