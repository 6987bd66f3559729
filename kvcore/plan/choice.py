"""Which placement: every one that is possible is drafted, and what holds more sequences is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcore.errors import LayoutError
from kvcore.plan.capacity import Capacity, Limits
from kvcore.plan.config import ARENA_ALIGNMENT, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Placement
from kvcore.plan.groups import CacheClass, ChosenClass, choose
from kvcore.plan.packing import PackedPlacement, packings
from kvcore.plan.placement import GroupPlace, SlotsPlacement, slots
from kvcore.spec.dtypes import round_up

Draft = SlotsPlacement | PackedPlacement
# The arena in which placements are compared, unless four sequences need more: never the given one, so that more memory
# does not change the plan.
REFERENCE_BYTES = 64 << 30
REFERENCE_SEQUENCES = 4
# The lengths at which they are compared.
LENGTHS = tuple(2**i for i in range(10, 23, 2))


@dataclass(frozen=True)
class Considered:
    """One placement that was drafted.

    Attributes:
        placement: ``slots`` or ``packed``.
        refused: Why it cannot be had; the figures below are 0 then.
        groups: Its KV groups.
        needed_bytes: One sequence of `max_model_len` tokens, null block included.
        reference_bytes: Bytes of the arena in which it was compared with the others.
        sequences: Of `max_model_len` tokens in that arena, before rounding.
    """

    placement: Placement
    refused: str | None = None
    groups: int = 0
    needed_bytes: int = 0
    reference_bytes: int = 0
    sequences: float = 0.0


@dataclass(frozen=True)
class Asked:
    """What the user said about blocks and their place.

    Attributes:
        placement: ``auto``, ``slots`` or ``packed``.
        block_size: Tokens of a block, or None for auto.
        block_size_by_kind: Another block size for the groups of some kinds.
        counted: The arena is given as a number of blocks, which `packed` does not have.
    """

    placement: str = "auto"
    block_size: int | None = None
    block_size_by_kind: Mapping[str, int] | None = None
    counted: bool = False


def draft(members: Sequence[CacheClass], limits: Limits, asked: Asked) -> tuple[Draft, tuple[Considered, ...]]:
    """The placement asked for; for ``auto``, `slots` unless `packed` holds more sequences of some length.

    All lengths are asked, not the planned one: what one sequence needs could fall as it grows, if the placement, or the
    cut of the large pages, changed on the way. Where both hold the same, `slots` is taken: the pages of a layer are
    neighbours, and nothing is left over in a large page.

    Raises:
        LayoutError: The placement asked for cannot be had, or neither can.
    """
    made: dict[Placement, Draft | LayoutError] = {}
    rival = _Rival(members, limits, asked)
    for placement in _possible(asked.placement):
        problem = _problem(members, asked) if asked.placement == "auto" and placement == "packed" else None
        made[placement] = problem or (_slots(members, limits, asked) if placement == "slots" else rival.packed())
    good = {name: d for name, d in made.items() if not isinstance(d, LayoutError)}
    if not good:
        raise next(d for d in made.values() if isinstance(d, LayoutError))
    best: Placement = "slots" if "slots" in good else "packed"
    if len(good) > 1 and rival.holds_more(good["packed"]):
        best = "packed"
    spent = _reference(good.values(), limits)
    considered = tuple(
        Considered(name, refused=str(d)) if isinstance(d, LayoutError) else _considered(name, d, limits, spent)
        for name, d in made.items()
    )
    return good[best], considered


class _Rival:
    """What `slots` holds at each of `LENGTHS`, beside which a packed draft has to stand."""

    def __init__(self, members: Sequence[CacheClass], limits: Limits, asked: Asked) -> None:
        self._members, self._asked = members, asked
        self._limits = [replace(limits, max_model_len=n) for n in LENGTHS]
        self._slots: dict[int, Draft | LayoutError] = {}

    def packed(self) -> Draft | LayoutError:
        """The cheapest packing that nowhere holds fewer sequences than `slots`, or the cheapest of all."""
        try:
            chosen = choose(self._members, self._asked.block_size, "packed", self._asked.block_size_by_kind)
        except LayoutError as error:
            return error
        drafts = packings(chosen)
        if len(drafts) == 1:
            return drafts[0]
        return next((d for d in drafts if all(self._gain(d, n) >= 0 for n in self._limits)), drafts[0])

    def holds_more(self, packed: Draft) -> bool:
        """Whether it holds more sequences at some length."""
        return any(self._gain(packed, n) > 0 for n in self._limits)

    def _gain(self, packed: Draft, limits: Limits) -> float:
        slots = self._slots.get(limits.max_model_len)
        if slots is None:
            slots = self._slots[limits.max_model_len] = _slots(self._members, limits, self._asked)
        if isinstance(slots, LayoutError):
            return 1.0
        spent = _reference((packed, slots), limits)
        return _sequences(packed, limits, spent) - _sequences(slots, limits, spent)


def _reference(drafts: Iterable[Draft], limits: Limits) -> int:
    return max(REFERENCE_BYTES, *(REFERENCE_SEQUENCES * _needed(d, limits) for d in drafts))


def _sequences(made: Draft, limits: Limits, spent: int) -> float:
    return Capacity(config_of(made, made.units(spent)), limits).concurrency(limits.max_model_len)


def _possible(placement: str) -> tuple[Placement, ...]:
    if placement == "slots":
        return ("slots",)
    return ("packed",) if placement == "packed" else ("slots", "packed")


def _problem(members: Sequence[CacheClass], asked: Asked) -> LayoutError | None:
    """What keeps `auto` from packing, whatever it would save."""
    if asked.counted:
        return LayoutError("cache.num_blocks counts blocks, of which each packed group has its own number")
    narrow = [c for c in members if c.offer.max_offset_bits < 63]
    if narrow:
        return LayoutError(f"views span the whole arena, and kernels of {narrow[0].offer.backend} address 31 bits")
    return None


def _slots(members: Sequence[CacheClass], limits: Limits, asked: Asked) -> Draft | LayoutError:
    try:
        return slots(choose(members, asked.block_size, "slots", asked.block_size_by_kind), limits)
    except LayoutError as error:
        return error


def _needed(made: Draft, limits: Limits) -> int:
    capacity = Capacity(config_of(made, 0), limits)
    return capacity.arena_bytes(capacity.needed_units(limits.max_model_len) + 1)


def _considered(name: Placement, made: Draft, limits: Limits, spent: int) -> Considered:
    sequences = _sequences(made, limits, spent)
    return Considered(name, None, len(made.groups), _needed(made, limits), spent, sequences)


def config_of(made: Draft, units: int) -> KVCacheConfig:
    """The config of a placement with so many blocks (`slots`) or large pages (`packed`)."""
    if isinstance(made, PackedPlacement):
        return _packed_config(made, units)
    groups = tuple(
        replace(_group(i, g), block_stride=max(made.strides[: len(g.cache_ids)]), num_blocks=units)
        for i, g in enumerate(made.groups)
    )
    tensors, offset = [], 0
    for i, stride in enumerate(made.strides):
        tensors.append(KVCacheTensor(offset, stride * units, stride, made.sharers(i)))
        offset = round_up(offset + stride * units, ARENA_ALIGNMENT)
    return KVCacheConfig("slots", units, groups, tuple(tensors))


def _packed_config(made: PackedPlacement, units: int) -> KVCacheConfig:
    groups = tuple(
        replace(_group(i, g), block_stride=made.block_stride(i), num_blocks=units * a, blocks_per_large_page=a)
        for i, (g, a) in enumerate(zip(made.groups, made.rulers, strict=True))
    )
    large, everyone = made.large_page_bytes, tuple(c for g in made.groups for c in g.cache_ids)
    return KVCacheConfig("packed", 0, groups, (KVCacheTensor(0, units * large, 0, everyone),), units, large)


def _group(index: int, place: GroupPlace) -> KVCacheGroupSpec:
    chosen: ChosenClass = place.chosen
    return KVCacheGroupSpec(
        index=index,
        spec=chosen.members.spec,
        backend=chosen.members.offer.backend,
        cache_ids=place.cache_ids,
        layout=chosen.layout,
        block_size=chosen.block_size,
        block_stride=0,
        num_blocks=0,
    )
