"""Arena and views: zero-copy, aligned, disjoint, inside; writes leave no byte outside their slots."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import canary
from support.poison import fill_poison

from kvcore.errors import CapacityError, ConfigError, LayoutError
from kvcore.memory.arena import Arena
from kvcore.memory.poison import poison_blocks
from kvcore.memory.views import field_tensor, field_tensors, logical_view
from kvcore.plan.config import FieldView
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import hnd, nhd
from kvcore.spec.retention import Full, Window


def element_bytes(arena, tensor):
    """bool [nbytes]: the bytes that the elements of a view cover, from its strides alone."""
    offsets = torch.zeros((), dtype=torch.int64) + tensor.data_ptr() - arena.address
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride * tensor.itemsize
    flat = (offsets.reshape(-1)[:, None] + torch.arange(tensor.itemsize)).reshape(-1)
    assert flat.unique().numel() == flat.numel(), "a view covers a byte twice"
    mask = torch.zeros(arena.nbytes, dtype=torch.bool)
    mask[flat] = True
    return mask


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000))
def test_the_arena_is_aligned_zeroed_and_keeps_its_size(nbytes):
    arena = Arena(nbytes)
    assert arena.address % 256 == 0
    assert arena.raw.shape == (nbytes,)
    assert arena.raw.dtype == torch.int8
    assert not arena.raw.any()


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5, None])
def test_an_impossible_arena_is_refused(nbytes):
    with pytest.raises(ConfigError, match=r"nbytes"):
        Arena(nbytes)


def test_views_share_the_arena(config):
    arena = Arena(config.total_bytes)
    for group in config.kv_cache_groups:
        for cache in group.cache_ids:
            for place in group.layout.places:
                tensor = field_tensors(arena, config, cache)[place.name]
                assert canary.lies_in(arena, tensor)
                assert tensor.shape == (group.num_blocks * group.ratio, *place.shape)
                arena.raw.zero_()
                fill_poison(tensor, place.dtype)
                assert arena.raw.any()


def test_no_two_ids_share_a_byte(config):
    """Blocks of unlike ids never overlap under slots, whichever groups they belong to."""
    if config.placement == "packed":
        return
    arena = Arena(config.total_bytes)
    for a in config.kv_cache_groups:
        mine = torch.zeros(arena.nbytes, dtype=torch.bool)
        for cache in a.cache_ids:
            mine |= canary.owned(config, cache, [3], arena.nbytes)
        for b in config.kv_cache_groups:
            for cache in b.cache_ids:
                others = [i for i in range(config.num_blocks) if i != 3]
                assert not (mine & canary.owned(config, cache, others, arena.nbytes)).any()


def test_blocks_of_a_packed_group_stay_in_their_large_page(config):
    """A large page has one owner, so no two groups share a byte as long as blocks stay inside."""
    if config.placement != "packed":
        return
    for group in config.kv_cache_groups:
        for block in range(group.num_blocks):
            page = block // group.blocks_per_large_page * config.large_page_bytes
            for cache in group.cache_ids:
                for start, end in config.footprint(cache, block):
                    assert page <= start < end <= page + config.large_page_bytes


def test_fields_of_one_group_are_aligned_and_disjoint(config):
    arena = Arena(config.total_bytes)
    for group in config.kv_cache_groups:
        covered = torch.zeros(arena.nbytes, dtype=torch.int32)
        for cache in group.cache_ids:
            for tensor in field_tensors(arena, config, cache).values():
                mask = element_bytes(arena, tensor)
                covered += mask
                alignment = group.layout.layout.alignment
                assert (tensor.data_ptr() - arena.address) % alignment == 0
                assert tensor.stride(0) * tensor.itemsize % alignment == 0
        assert int(covered.max()) == 1


def test_a_field_stays_inside_the_footprint_of_its_block(config):
    """And blocks of one group, or one id in two groups under slots, never share a byte."""
    arena = Arena(config.total_bytes)
    for group in config.kv_cache_groups:
        for cache in group.cache_ids:
            tensors = field_tensors(arena, config, cache)
            for block in (1, group.num_blocks - 1):
                mine = canary.owned(config, cache, [block], arena.nbytes)
                kernel = slice(block * group.ratio, (block + 1) * group.ratio)
                for tensor in tensors.values():
                    assert not (element_bytes(arena, tensor[kernel]) & ~mine).any()


def test_writes_touch_their_slots_and_nothing_else(config):
    """Every field, layout and placement: the other bytes keep the canary."""
    arena = Arena(config.total_bytes)
    for group in config.kv_cache_groups:
        if group.spec.content.per_request:
            continue
        size = group.kernel_block_size
        slots = [size * group.ratio, size * group.ratio + size - 1, group.num_blocks * size * group.ratio - 1]
        for cache in group.cache_ids:
            for placed in group.layout.layout.fields:
                canary.paint(arena)
                tensor = field_tensors(arena, config, cache)[placed.name]
                want = canary.slot_bytes(config, cache, placed.name, slots, arena.nbytes)
                for slot in slots:
                    _fill_slot(tensor, placed, slot, size)
                assert torch.equal(canary.changed(arena), want)
                assert want.any()


def _fill_slot(tensor, placed, slot, size):
    block, offset = divmod(slot, size)
    axis = next(i for i, a in enumerate(placed.axes) if a.name == "token")
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    tensor.view(integer)[block].select(axis, offset).fill_(0)


def test_shared_tensors_of_the_worked_example(plans):
    """L0, L2 full and L1, L3 window: tensors {L0, L1} and {L2, L3}, KV-first, canaries intact."""
    content = KVHeads(2, 8, dtype="float16")
    layout = nhd(content, name="kv_first", order="field_first")
    config = plans.make([((0, 2), content, Full(), layout, None), ((1, 3), content, Window(8), layout, None)])
    shared = [set(t.shared_by) for t in config.kv_cache_tensors]
    assert shared == [{CacheId(0), CacheId(1)}, {CacheId(2), CacheId(3)}]
    arena = Arena(config.total_bytes)
    for layer in range(4):
        for block in range(1, config.num_blocks):
            canary.paint(arena)
            for tensor in field_tensors(arena, config, CacheId(layer)).values():
                tensor[block] = 0
            mine = canary.owned(config, CacheId(layer), [block], arena.nbytes)
            assert torch.equal(canary.changed(arena), mine)


def test_field_first_beside_block_first_is_refused_by_name(plans):
    content = KVHeads(2, 8, dtype="float16")
    with pytest.raises(LayoutError, match=r"kv_first.*hnd"):
        plans.make(
            [
                ((0,), content, Full(), nhd(content, name="kv_first", order="field_first"), None),
                ((1,), content, Window(8), hnd(content), None),
            ]
        )


@pytest.mark.parametrize(("block", "kernel"), [(16, None), (32, 16)])
def test_gpt2(plans, block, kernel):
    """12 layers, 12 heads of 64, float16: the figures of the published walk-through."""
    content = KVHeads(12, 64, dtype="float16")
    layout = nhd(content, name="kv_first", order="field_first")
    blocks = 911_523_840 // (49_152 * block // 16)
    config = plans.make([((0,), content, Full(), layout, kernel)], block_size=block, blocks=blocks)
    (tensor,) = config.kv_cache_tensors
    if block == 16:
        assert (config.kv_cache_groups[0].page_bytes, blocks, tensor.nbytes) == (49_152, 18_545, 911_523_840)
    arena = Arena(config.total_bytes)  # pages that nobody touches take no memory
    count = blocks if kernel is None else 2 * blocks
    keys, values = field_tensors(arena, config, CacheId(0)).values()
    # One run each, the second behind the first: together [2, N, 16, 12, 64] without a gap.
    assert keys.shape == values.shape == (count, 16, 12, 64)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert values.data_ptr() - keys.data_ptr() == keys.numel() * keys.itemsize


def test_logical_order_is_a_permutation(plans):
    config = plans.build("unlike_dims")
    arena, group = Arena(config.total_bytes), config.kv_cache_groups[0]
    tensor = field_tensors(arena, config, CacheId(0))["v"]
    content = group.spec.content
    view = logical_view(tensor, group.layout.layout.fields[1], content.fields()[1])
    assert view.shape == (group.num_blocks * group.ratio, 2, 3, 7)
    view[5, 1, 2, 6] = 3
    assert tensor[5, 2, 1, 6] == 3
    assert view.data_ptr() == tensor.data_ptr()


def test_a_split_axis_has_no_logical_view(plans):
    config = plans.build("split_keys")
    arena, group = Arena(config.total_bytes), config.kv_cache_groups[0]
    tensor = field_tensors(arena, config, CacheId(0))["k"]
    with pytest.raises(LayoutError, match="split axis"):
        logical_view(tensor, group.layout.layout.fields[0], group.spec.content.fields()[0])


def test_a_state_has_no_token_axis(plans):
    config = plans.build("stateful")
    group = next(g for g in config.kv_cache_groups if g.spec.content.per_request)
    arena = Arena(config.total_bytes)
    tensor = field_tensors(arena, config, group.cache_ids[0])["ssm"]
    view = logical_view(tensor, group.layout.layout.fields[1], group.spec.content.fields()[1])
    assert view.shape == (group.num_blocks, 2, 4)


@pytest.mark.parametrize(
    ("view", "alignment", "match"),
    [
        (FieldView("k", "float32", 0, (4, 8), (32, 4)), 1, None),
        (FieldView("k", "float32", 4, (4, 8), (32, 4)), 1, "leave the arena"),
        (FieldView("k", "float32", -4, (1, 1), (4, 4)), 1, "leave the arena"),
        (FieldView("k", "float32", 0, (5, 8), (32, 4)), 1, "leave the arena"),
        (FieldView("k", "float32", 0, (0, 8), (32, 4)), 1, "leave the arena"),
        (FieldView("k", "float32", 2, (2, 8), (32, 4)), 1, "aligned"),
        (FieldView("k", "float32", 0, (2, 8), (34, 4)), 1, "aligned"),
        (FieldView("k", "float32", 8, (2, 8), (32, 4)), 16, "alignment"),
        (FieldView("k", "float32", 0, (2, 2), (24, 4)), 16, "alignment"),
    ],
)
def test_bad_views_are_refused(view, alignment, match):
    arena = Arena(128)
    if match is None:
        assert field_tensor(arena, view, alignment).shape == view.shape
        return
    with pytest.raises(LayoutError, match=match):
        field_tensor(arena, view, alignment)


def test_contains_knows_the_bounds():
    arena = Arena(100)
    assert canary.lies_in(arena, arena.raw)
    assert canary.lies_in(arena, arena.raw[99:])
    assert not canary.lies_in(arena, arena.as_dtype(torch.int8)[:101])
    assert not canary.lies_in(arena, torch.zeros(1, dtype=torch.int8))


def test_poison_fills_every_field_of_the_block_and_no_other(config):
    arena = Arena(config.total_bytes)
    for group in config.kv_cache_groups:
        arena.raw.zero_()
        block = group.num_blocks - 1
        poison_blocks(arena, config, group.index, [block])
        allowed = torch.zeros(arena.nbytes, dtype=torch.bool)
        for cache in group.cache_ids:
            allowed |= canary.owned(config, cache, [block], arena.nbytes)
            for place in group.layout.places:
                part = field_tensors(arena, config, cache)[place.name][block * group.ratio :]
                if part.dtype.is_floating_point:
                    assert part.float().isnan().all()
                else:
                    assert (part.view(torch.int8) == (-128 if place.dtype == "int8" else -120)).all()
        assert not ((arena.raw != 0) & ~allowed).any()


def test_a_shared_cache_has_its_owners_views(plans):
    config = plans.build("nhd")
    group = config.kv_cache_groups[0]
    reader = CacheId(77)
    config = replace(config, kv_cache_groups=(replace(group, shared={reader: CacheId(2)}), *config.kv_cache_groups[1:]))
    arena = Arena(config.total_bytes)
    for name, tensor in field_tensors(arena, config, reader).items():
        owner = field_tensors(arena, config, CacheId(2))[name]
        assert (tensor.data_ptr(), tensor.shape, tensor.stride()) == (owner.data_ptr(), owner.shape, owner.stride())


@pytest.mark.parametrize("exponent", [60, 63, 70])
def test_an_arena_that_no_machine_has_is_a_typed_error(exponent):
    with pytest.raises(CapacityError) as caught:
        Arena(2**exponent)
    assert caught.value.field == "cache.memory"
