"""No byte belongs to two owners: every view and footprint of random plans, byte by byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import Model, block_first, kv_first, limits, models, spec

from kvcore.plan.capacity import Limits
from kvcore.plan.config import FieldView, KVCacheConfig
from kvcore.plan.planner import Budget
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import KernelBlocks
from kvcore.spec.retention import Full, Window

WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 1, "int32": 4}
memory = st.integers(1, 40_000)
SHORT = Limits(max_model_len=16, max_num_batched_tokens=16)


def bytes_by_kernel_block(view: FieldView) -> npt.NDArray[np.int64]:
    """[kernel blocks, bytes]: every byte that a field's view reaches, from shape and strides alone."""
    where = np.array([view.offset], dtype=np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        where = (where[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    where = where[:, None] + np.arange(WIDTH[view.dtype], dtype=np.int64)
    return where.reshape(view.shape[0], -1) if view.shape[0] else where.reshape(0, 1)


def sample(blocks: int) -> list[int]:
    """All of a few blocks; of many the first, the last and some between."""
    return sorted({*range(min(blocks, 8)), *range(0, blocks, max(1, blocks // 8)), *range(blocks)[-3:]})


def check_views(config: KVCacheConfig) -> None:
    """All that holds for any plan, whatever its placement."""
    for group in config.kv_cache_groups:
        used: list[npt.NDArray[np.int64]] = []
        for cache in group.cache_ids:
            footprints = {b: config.footprint(cache, b) for b in sample(group.num_blocks)}
            for view in config.field_views(cache):
                assert view.shape[0] == group.num_blocks * group.ratio
                alignment = group.layout.layout.alignment
                assert view.offset % alignment == view.strides[0] % alignment == 0
                touched = bytes_by_kernel_block(view)
                used.append(touched)
                for block, ranges in footprints.items():
                    mine = touched[block * group.ratio : (block + 1) * group.ratio].ravel()
                    inside = np.zeros(len(mine), dtype=bool)
                    for start, end in ranges:
                        inside |= (start <= mine) & (mine < end)
                    assert inside.all()
        if group.num_blocks:
            every = np.concatenate([u.ravel() for u in used])
            assert every.min() >= 0
            assert every.max() < config.total_bytes
            # Within a group no byte serves two (cache, field, block, element).
            assert np.bincount(every).max() == 1


def check_slots(config: KVCacheConfig) -> None:
    """A block id covers the same bytes for every group, so that one owner at a time is enough."""
    for tensor in config.kv_cache_tensors:
        assert tensor.offset % 256 == 0
        assert tensor.nbytes == tensor.block_stride * config.num_blocks
        for block in range(config.num_blocks):
            assert len({merged(config.footprint(c, block)) for c in tensor.shared_by}) == 1
    owners = [c for t in config.kv_cache_tensors for c in t.shared_by]
    assert sorted(owners) == sorted(c for g in config.kv_cache_groups for c in g.cache_ids)
    for group in config.kv_cache_groups:
        for tensor in config.kv_cache_tensors:
            assert len(set(group.cache_ids) & set(tensor.shared_by)) <= 1
    claimed = np.zeros(config.total_bytes, dtype=np.int64)
    for tensor in config.kv_cache_tensors:
        for block in range(config.num_blocks):
            for start, end in config.footprint(tensor.shared_by[0], block):
                claimed[start:end] += 1
    assert claimed.max(initial=0) <= 1


def merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same set of bytes with neighbours joined, so that equal sets are equal values."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def check_packed(config: KVCacheConfig) -> None:
    """Every block lies inside one large page, the one that its ruler says."""
    assert config.total_bytes == config.num_large_pages * config.large_page_bytes
    for group in config.kv_cache_groups:
        a = group.blocks_per_large_page
        assert group.block_stride * a == config.large_page_bytes
        assert group.num_blocks == a * config.num_large_pages
        for block in sample(group.num_blocks):
            ranges = [r for c in group.cache_ids for r in config.footprint(c, block)]
            page = block // a
            assert min(r[0] for r in ranges) >= page * config.large_page_bytes
            assert max(r[1] for r in ranges) <= (page + 1) * config.large_page_bytes


@given(models(("slots",)), st.integers(0, 9), limits)
def test_views_under_slots(model: Model, blocks: int, limits: Limits) -> None:
    per_block = model.plan(Budget(num_blocks=1), limits).configs[0].total_bytes
    memory_bytes = blocks * per_block + 1 + blocks * 7
    config = model.plan(Budget(memory=memory_bytes), limits).configs[0]
    assert config.total_bytes <= memory_bytes
    check_views(config)
    check_slots(config)


@given(models(("packed",)), st.integers(0, 3), limits)
def test_views_under_packed(model: Model, pages: int, limits: Limits) -> None:
    large = model.plan(Budget(memory=1), limits).configs[0].large_page_bytes
    memory_bytes = pages * large + large - 1
    config = model.plan(Budget(memory=memory_bytes), limits).configs[0]
    assert config.num_large_pages == pages
    assert config.total_bytes <= memory_bytes
    check_views(config)
    check_packed(config)


@given(st.integers(1, 3), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.data())
def test_views_of_field_first_plans(heads: int, dim: int, ratio: int, blocks: int, data: st.DataObject) -> None:
    """Full and window layers of equal page bytes share tensors field-first, at unlike kernel blocks too."""
    content = KVHeads(heads, dim, dtype="float16")
    caches, offers = {}, {}
    for i in range(data.draw(st.integers(1, 6))):
        window = data.draw(st.booleans())
        caches[CacheId(i)] = spec(content, Window(5) if window else Full())
        kernel = KernelBlocks((16 * 4 // (ratio if window else 1),))
        offers[CacheId(i)] = kv_first(content, kernel)
    config = Model(caches, offers, 64, "slots").plan(Budget(num_blocks=blocks), SHORT).configs[0]
    assert all(g.layout.field_first for g in config.kv_cache_groups)
    check_views(config)
    check_slots(config)


@given(models(("slots",)), memory, limits)
def test_one_more_block_would_not_fit(model: Model, memory_bytes: int, limits: Limits) -> None:
    config = model.plan(Budget(memory=memory_bytes), limits).configs[0]
    more = model.plan(Budget(num_blocks=config.num_blocks + 1), limits).configs[0]
    assert config.total_bytes <= memory_bytes < more.total_bytes


@given(models(("packed",)), limits)
def test_rulers_do_not_depend_on_the_memory(model: Model, limits: Limits) -> None:
    small = model.plan(Budget(memory=1), limits).configs[0]
    large = model.plan(Budget(memory=10**12), limits).configs[0]
    assert small.num_large_pages == 0
    assert small.large_page_bytes == large.large_page_bytes
    for a, b in zip(small.kv_cache_groups, large.kv_cache_groups, strict=True):
        assert (a.block_stride, a.blocks_per_large_page) == (b.block_stride, b.blocks_per_large_page)


@given(models(("packed",)), limits)
def test_packing_wastes_no_more_than_one_block_a_large_page(model: Model, limits: Limits) -> None:
    """Against the plainest packing there is: one block of the widest group to a large page."""
    config = model.plan(Budget(memory=10**9), limits).configs[0]
    need = [g.page_bytes * len(g.cache_ids) for g in config.kv_cache_groups]
    step = int(np.lcm.reduce([256, *(g.layout.layout.alignment * g.ratio for g in config.kv_cache_groups)]))
    plain = -(-max(need) // step) * step
    waste = [1 - n / g.block_stride for n, g in zip(need, config.kv_cache_groups, strict=True)]
    reference, large = 16 << 30, config.large_page_bytes
    cost = sum(waste) / len(need) * reference + len(need) * large / 2
    plain_cost = sum(1 - n / plain for n in need) / len(need) * reference + len(need) * plain / 2
    assert cost <= plain_cost * (1 + 1e-12)


def test_a_shared_cache_reads_its_owners_bytes_through_a_chain() -> None:
    from kvcore.plan.planner import plan

    content = KVHeads(2, 8)
    caches = {CacheId(i): spec(content) for i in range(2)}
    offers = {c: block_first(content) for c in caches}
    shared = {CacheId(2): CacheId(1), CacheId(3): CacheId(2)}
    config = plan(caches, offers, Budget(num_blocks=4), SHORT, shared=shared).configs[0]
    assert config.field_views(CacheId(3)) == config.field_views(CacheId(1))
    assert config.footprint(CacheId(2), 3) == config.footprint(CacheId(1), 3)
    assert config.group_of(CacheId(3)).index == config.group_of(CacheId(1)).index
    assert config.total_bytes == plan(caches, offers, Budget(num_blocks=4), SHORT).configs[0].total_bytes


def test_the_proof_can_fail() -> None:
    """Squeezing the stride of a good plan makes blocks overlap, and `check_views` sees it."""
    content = KVHeads(2, 8)
    model = Model({CacheId(0): spec(content)}, {CacheId(0): block_first(content)}, 16, "slots")
    good = model.plan(Budget(num_blocks=4), SHORT).configs[0]
    check_views(good)
    squeezed = replace(good.kv_cache_tensors[0], block_stride=good.kv_cache_tensors[0].block_stride // 2)
    with pytest.raises(AssertionError):
        check_views(replace(good, kv_cache_tensors=(squeezed,)))
