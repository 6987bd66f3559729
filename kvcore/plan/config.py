"""`KVCacheConfig`: the plan of one rank as data: groups, tensors, strides, and where each field lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from kvcore.errors import SpecError
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.dtypes import round_up
from kvcore.spec.layout import SizedLayout

Placement = Literal["slots", "packed"]
NULL_BLOCK = 0
ARENA_ALIGNMENT = 256


def slots_bytes(strides: Sequence[int], num_blocks: int) -> int:
    """Bytes of an arena of tensors with these block strides, each starting on a multiple of 256."""
    padded = sum(round_up(s * num_blocks, ARENA_ALIGNMENT) for s in strides[:-1])
    return padded + strides[-1] * num_blocks


@dataclass(frozen=True)
class KVCacheTensor:
    """One run of bytes in the arena, cut into blocks (`slots`), or the whole arena (`packed`).

    Attributes:
        offset: Bytes from the start of the arena, a multiple of 256.
        nbytes: Bytes of the run.
        block_stride: Bytes from one block id to the next (`slots`; 0 when packed).
        shared_by: The caches that lie here; never two of one KV group under `slots`.
    """

    offset: int
    nbytes: int
    block_stride: int
    shared_by: tuple[CacheId, ...]


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """The caches that share one block table.

    Attributes:
        index: Position in `KVCacheConfig.kv_cache_groups`.
        spec: Content and retention that all its caches have.
        backend: Name of the backend that serves it, or None (states, or none installed).
        cache_ids: The caches that own bytes, in model order.
        shared: Caches without bytes, and whose bytes they read.
        layout: The layout at the kernel block size.
        block_size: Tokens of a manager block; 1 state for per-request contents.
        block_stride: Bytes of one block in all layers of the group (packed), or of one page (slots).
        num_blocks: Ids of this group, the null block(s) included.
        blocks_per_large_page: a_g under `packed`; 0 under `slots`.
    """

    index: int
    spec: KVCacheSpec
    backend: str | None
    cache_ids: tuple[CacheId, ...]
    layout: SizedLayout
    block_size: int
    block_stride: int
    num_blocks: int
    blocks_per_large_page: int = 0
    shared: Mapping[CacheId, CacheId] = field(default_factory=dict)

    @property
    def kernel_block_size(self) -> int:
        """Tokens of a kernel block, a divisor of `block_size`."""
        return self.layout.kernel_block_size

    @property
    def ratio(self) -> int:
        """Kernel blocks in a manager block, r."""
        return self.block_size // self.kernel_block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer, the layout's own padding included."""
        return self.layout.kernel_page_bytes * self.ratio

    @property
    def stride_unit(self) -> int:
        """Block strides are multiples of this: r times the alignment, for each field-first run."""
        runs = len(self.layout.places) if self.layout.field_first else 1
        return self.layout.layout.alignment * self.ratio * runs


class FieldView(NamedTuple):
    """Where one field of one cache lies, for `memory.views` alone to make a tensor of.

    Attributes:
        name: Field name.
        dtype: Name of the element type.
        offset: Bytes from the start of the arena.
        shape: (kernel blocks, *axes in memory order).
        strides: Bytes, one for each axis of `shape`.
    """

    name: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class KVCacheConfig:
    """What a worker needs to allocate, view and bind its cache.

    Attributes:
        placement: ``slots`` or ``packed``.
        num_blocks: Block ids, null block included (`slots`; 0 when packed).
        kv_cache_groups: The groups, by index.
        kv_cache_tensors: The runs of bytes.
        num_large_pages, large_page_bytes: Under `packed`, large page 0 included; 0 under `slots`.
        global_rank: The rank that this config is for.
        own_units: Ids or large pages that this rank's memory would hold; all ranks take the fewest, so that ids agree.
    """

    placement: Placement
    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    num_large_pages: int = 0
    large_page_bytes: int = 0
    global_rank: int = 0
    own_units: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the arena."""
        return max((t.offset + t.nbytes for t in self.kv_cache_tensors), default=0)

    def group_of(self, cache: CacheId) -> KVCacheGroupSpec:
        """The KV group of a cache, shared ones included."""
        if cache not in self._groups:
            raise SpecError("no such cache in the plan", field="cache_id", got=str(cache))
        return self._groups[cache]

    # Looked up, not searched: a model may have ten thousand layers.
    @cached_property
    def _groups(self) -> dict[CacheId, KVCacheGroupSpec]:
        return {cache: g for g in self.kv_cache_groups for cache in (*g.cache_ids, *g.shared)}

    @cached_property
    def _tensors(self) -> dict[CacheId, KVCacheTensor]:
        return {cache: t for t in self.kv_cache_tensors for cache in t.shared_by}

    @cached_property
    def _positions(self) -> dict[CacheId, int]:
        return {cache: i for g in self.kv_cache_groups for i, cache in enumerate(g.cache_ids)}

    def field_views(self, cache: CacheId) -> tuple[FieldView, ...]:
        """Where the fields of `cache` lie; a shared cache gives its owner's views."""
        group = self.group_of(cache)
        owner = group.shared.get(cache, cache)
        layout, ratio = group.layout, group.ratio
        if self.placement == "packed":
            stride = group.block_stride // ratio
            base = self._positions[owner] * layout.kernel_page_bytes
        else:
            tensor = self._tensors[owner]
            stride, base = tensor.block_stride // ratio, tensor.offset
        if layout.field_first:
            # Each field is its own run of N pieces, one run after the other.
            stride //= len(layout.places)
        count = group.num_blocks * ratio
        views = []
        for i, place in enumerate(layout.places):
            start = base + (i * count * stride if layout.field_first else place.offset)
            views.append(FieldView(place.name, place.dtype, start, (count, *place.shape), (stride, *place.strides)))
        return tuple(views)

    def footprint(self, cache: CacheId, block: int) -> list[tuple[int, int]]:
        """Byte ranges [start, end) that `block` owns in `cache`, padding included; for proofs and copies."""
        group = self.group_of(cache)
        owner = group.shared.get(cache, cache)
        if self.placement == "packed":
            # The r kernel pages of one layer are a kernel stride apart.
            kernel, page = group.block_stride // group.ratio, group.layout.kernel_page_bytes
            base = self._positions[owner] * page
            first = block * group.ratio
            return [(base + j * kernel, base + j * kernel + page) for j in range(first, first + group.ratio)]
        tensor = self._tensors[owner]
        runs = len(group.layout.places) if group.layout.field_first else 1
        piece = tensor.block_stride // runs
        starts = [tensor.offset + (run * group.num_blocks + block) * piece for run in range(runs)]
        return [(start, start + piece) for start in starts]
