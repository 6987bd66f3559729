"""Where pages lie in the raw bytes: `slots` (layer-major, shared tensors) or `packed` (many rulers).

slots, group width 2: L0, L2 full; L1, L3 window        packed: large pages of M bytes
  tensor 0  | block 0 | block 1 | ...  L0 and L1          group full    | 0  | 1  | 2  | 3  | ..
  tensor 1  | block 0 | block 1 | ...  L2 and L3          group window  |  0   |  1   |  2  | ..
A block id belongs to one group at a time.              A large page belongs to one group at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

from kvcore.errors import LayoutError
from kvcore.plan.config import ARENA_ALIGNMENT, slots_bytes
from kvcore.plan.groups import ChosenClass
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.dtypes import ceil_div, round_up

# Sizes at which alternatives are compared: fixed, so that more memory or a longer limit never changes
# the shape of the plan, and capacity stays monotonic.
REFERENCE_TOKENS = 8192
REFERENCE_BYTES = 16 << 30
# Each group costs its own metadata and table every step. 46 groups of one layer were reported to
# halve decode speed (vllm-project/vllm#51742): 1 / 45 of a step for each group beyond the first.
GROUP_OVERHEAD = 1 / 45
# Blocks that a large page may be cut into: smooth numbers, so that their lcm stays small.
RULERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


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

    def num_blocks(self, memory_bytes: int) -> int:
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


def slots(chosen: Sequence[ChosenClass]) -> SlotsPlacement:
    """The group width of least cost: bytes at a reference length, plus the overhead of each group."""
    # Only where some class falls into another number of groups does a width make a difference.
    lengths = {len(c.members.cache_ids) for c in chosen}
    widths = sorted({ceil_div(n, parts) for n in lengths for parts in range(1, n + 1)})
    cost = _SlotsCost(chosen)
    # Ties go to the wider groups: fewer tables.
    return _slots_of_width(chosen, min(reversed(widths), key=cost.of_width))


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


class _SlotsCost:
    """What a group width costs, without making the groups: classes that count alike are counted together."""

    def __init__(self, chosen: Sequence[ChosenClass]) -> None:
        self._unit = _stride_unit(chosen)
        self._classes = Counter(
            (
                len(c.members.cache_ids),
                c.page_bytes,
                c.members.spec.retention.resident_blocks(REFERENCE_TOKENS, c.block_size),
            )
            for c in chosen
        )

    def of_width(self, width: int) -> float:
        """Bytes of one sequence of the reference length, dearer by each group beyond the first."""
        blocks = groups = 0
        pages = []
        for (length, page, resident), count in self._classes.items():
            parts = ceil_div(length, width)
            pages.append((ceil_div(length, parts), page))
            blocks += count * parts * resident
            groups += count * parts
        per_block = sum(count * stride for count, stride in _strides(pages, self._unit))
        return blocks * per_block * (1 + GROUP_OVERHEAD * (groups - 1))


@dataclass(frozen=True)
class PackedPlacement:
    """One arena measured with one ruler a group.

    Attributes:
        groups: One KV group for each class.
        large_page_bytes: M.
        rulers: a_g, blocks of each group in a large page.
    """

    groups: tuple[GroupPlace, ...]
    large_page_bytes: int
    rulers: tuple[int, ...]

    def block_stride(self, group: int) -> int:
        """Bytes of one block of a group, padding included."""
        return self.large_page_bytes // self.rulers[group]


def packed(chosen: Sequence[ChosenClass]) -> PackedPlacement:
    """The rulers of least padding plus half a large page a group, at a reference arena."""
    need = [c.page_bytes * len(c.members.cache_ids) for c in chosen]
    unit = [c.stride_unit for c in chosen]
    best: tuple[float, int, tuple[int, ...]] | None = None
    for target in sorted({n * a for n, a in product(need, RULERS)}):
        if target < max(need):
            continue
        rulers = tuple(max(a for a in RULERS if a * n <= target) for n in need)
        step = lcm(ARENA_ALIGNMENT, *(a * u for a, u in zip(rulers, unit, strict=True)))
        large = round_up(target, step)
        padding = sum(1 - a * n / large for a, n in zip(rulers, need, strict=True)) / len(need)
        cost = padding * REFERENCE_BYTES + len(need) * large / 2
        if best is None or (cost, large) < best[:2]:
            best = (cost, large, rulers)
    if best is None:  # RULERS holds 1, so max(need) itself is always a target
        raise LayoutError("no large page fits the groups", field="cache.placement", got=need)
    groups = tuple(GroupPlace(c, c.members.cache_ids) for c in chosen)
    return PackedPlacement(groups, best[1], best[2])
