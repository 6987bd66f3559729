"""Copy, zero and swap, byte for byte against a loop over footprints."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.errors import IntegrityError, LayoutError
from kvcore.memory.arena import Arena
from kvcore.memory.copy import block_views, copy_between, copy_blocks, zero_blocks
from kvcore.memory.kernels import block_copy
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import hnd, nhd
from kvcore.spec.retention import Full


def random_arena(config, seed=0):
    arena = Arena(config.total_bytes)
    generator = torch.Generator().manual_seed(seed)
    arena.raw.copy_(torch.randint(1, 127, (arena.nbytes,), generator=generator, dtype=torch.int8))
    return arena


def pieces(config, group, block):
    """The byte ranges of one block in all layers; packed: the whole block, padding included."""
    spec = config.kv_cache_groups[group]
    if config.placement == "packed":
        return [(block * spec.block_stride, (block + 1) * spec.block_stride)]
    return [r for cache in spec.cache_ids for r in config.footprint(cache, block)]


def loop_copy(source, source_config, target, target_config, group, pairs):
    """All reads, then all writes."""
    read = [[source[a:b].clone() for a, b in pieces(source_config, group, f)] for f, _ in pairs]
    for (_, t), parts in zip(pairs, read, strict=True):
        for (a, b), part in zip(pieces(target_config, group, t), parts, strict=True):
            target[a:b] = part


def usable(config, group):
    spec = config.kv_cache_groups[group]
    return list(range(max(1, spec.blocks_per_large_page), spec.num_blocks))


@pytest.mark.parametrize("bound", [block_copy.TEMPORARY_BYTES, 1])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_copies_are_exact(config, bound, data):
    group = data.draw(st.integers(0, len(config.kv_cache_groups) - 1))
    ids = usable(config, group)
    targets = data.draw(st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=6))
    pairs = [(data.draw(st.sampled_from(ids)), t) for t in targets]
    arena, before = random_arena(config), block_copy.TEMPORARY_BYTES
    want = arena.raw.clone()
    loop_copy(want, config, want, config, group, pairs)
    block_copy.TEMPORARY_BYTES = bound
    try:
        copy_blocks(arena, config, group, pairs)
    finally:
        block_copy.TEMPORARY_BYTES = before
    assert torch.equal(arena.raw, want)


def test_zero_is_exact(config):
    for group in range(len(config.kv_cache_groups)):
        arena, blocks = random_arena(config), usable(config, group)[::2]
        want = arena.raw.clone()
        for block in blocks:
            for a, b in pieces(config, group, block):
                want[a:b] = 0
        zero_blocks(arena, config, group, blocks)
        assert torch.equal(arena.raw, want)


def test_swap_between_arenas(config, plans, request):
    """A host arena of another size: out, then in again to another id."""
    name = request.node.callspec.params["config"]
    other = plans.make(plans.recipe(name), placement=config.placement, blocks=7, large_pages=5)
    for group in range(len(config.kv_cache_groups)):
        device, host = random_arena(config, 1), random_arena(other, 2)
        here, there = usable(config, group), usable(other, group)
        out = [(here[0], there[2]), (here[2], there[0])]
        want_host = host.raw.clone()
        loop_copy(device.raw, config, want_host, other, group, out)
        copy_between(device, config, host, other, group, out)
        assert torch.equal(host.raw, want_host)
        back = [(there[2], here[2])]
        want = device.raw.clone()
        loop_copy(host.raw, other, want, config, group, back)
        copy_between(host, other, device, config, group, back)
        assert torch.equal(device.raw, want)


def test_nothing_to_do_is_fine(config):
    arena = random_arena(config)
    want = arena.raw.clone()
    copy_blocks(arena, config, 0, [])
    zero_blocks(arena, config, 0, [])
    assert torch.equal(arena.raw, want)


def test_bad_ids_are_refused_before_anything_is_written(config):
    spec = config.kv_cache_groups[0]
    null, end, good = max(1, spec.blocks_per_large_page) - 1, spec.num_blocks, usable(config, 0)
    arena = random_arena(config)
    want = arena.raw.clone()
    for pairs in (
        [(good[0], null)],
        [(good[0], end)],
        [(end, good[0])],
        [(-1, good[0])],
        [(good[0], good[2]), (good[1], good[2])],
    ):
        with pytest.raises(IntegrityError):
            copy_blocks(arena, config, 0, pairs)
    for blocks in ([null], [end], [-1]):
        with pytest.raises(IntegrityError):
            zero_blocks(arena, config, 0, blocks)
    assert torch.equal(arena.raw, want)


def test_arenas_of_unlike_layout_do_not_mix(plans):
    content = KVHeads(2, 8, dtype="float16")
    a = plans.make([((0,), content, Full(), hnd(content), None)])
    b = plans.make([((0,), content, Full(), nhd(content), None)])
    with pytest.raises(LayoutError, match="otherwise"):
        copy_between(random_arena(a), a, random_arena(b), b, 0, [(1, 1)])


def test_even_layers_are_one_view(plans):
    """No loop over layers where their tensors lie at even distances."""
    content = KVHeads(2, 8, dtype="float16")
    config = plans.make([(range(10), content, Full(), nhd(content), None)])
    (view,) = block_views(Arena(config.total_bytes), config, 0)
    assert view.shape == (10, 1, 12, config.kv_cache_groups[0].page_bytes)
