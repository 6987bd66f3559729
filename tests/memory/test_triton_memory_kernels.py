"""The core's Triton kernels, interpreted, against their torch twins and plain loops."""

import pytest
import torch

from kvcore.memory.kernels import block_copy
from kvcore.memory.kernels.cache_write import write_slots
from kvcore.memory.kernels.slot_mapping import slot_mapping

pytest.importorskip("triton")


def slots_by_loop(table, first_block, starts, computed, size, world, rank, capacity):
    out = [-1] * capacity
    for s in range(len(computed)):
        for t in range(starts[s], starts[s + 1]):
            position = computed[s] + t - starts[s]
            if position % world == rank:
                local = position // world
                out[t] = int(table[s][local // size - first_block[s]]) * size + local % size
    return out


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("interpret", [False, True])
def test_slots_from_query_starts(world, rank, interpret):
    size, capacity = 4, 40
    computed, first = [5, 0, 17, 8], [0, 0, 1, 2 if world == 1 else 0]
    starts = [0, 1, 10, 13, 21]
    table = torch.randperm(4 * 6, generator=torch.Generator().manual_seed(1)).int().view(4, 6) + 3
    want = slots_by_loop(table, first, starts, computed, size, world, rank, capacity)
    first_block = torch.tensor(first, dtype=torch.int32)
    out = torch.full((capacity,), 99, dtype=torch.int64)
    ranks = {"world": world, "rank": rank, "interpret": interpret}
    slot_mapping(
        table,
        first_block,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(computed, dtype=torch.int32),
        size,
        out,
        **ranks,
    )
    assert out.tolist() == want


def strided(shape, strides, seed=0):
    flat = torch.randint(1, 127, (9000,), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return flat, flat[64:].as_strided(shape, strides)


@pytest.mark.parametrize("width", [24, 33])
@pytest.mark.parametrize("pairs", [[(1, 2), (3, 5)], [(1, 2), (2, 1), (4, 3)]])
def test_copy_is_the_torch_copy(width, pairs):
    """Widths of whole words and odd ones; pairs that read what others write."""
    strides = (1200, 400, 48 if width == 24 else 35, 1)
    flat, view = strided((2, 2, 7, width), strides)
    twin_flat, twin = strided((2, 2, 7, width), strides)
    from_n, to_n = (torch.tensor(side) for side in zip(*pairs, strict=True))
    block_copy.copy_blocks(twin, twin, from_n, to_n)
    block_copy.copy_blocks(view, view, from_n, to_n, interpret=True)
    assert torch.equal(flat, twin_flat)


def test_copy_between_views_of_unlike_strides():
    _, source = strided((2, 1, 5, 32), (2000, 2000, 64, 1))
    flat, target = strided((2, 1, 9, 32), (1600, 1600, 40, 1), seed=1)
    twin_flat, twin = strided((2, 1, 9, 32), (1600, 1600, 40, 1), seed=1)
    from_n, to_n = torch.tensor([4, 0]), torch.tensor([8, 3])
    block_copy.copy_blocks(source, twin, from_n, to_n)
    block_copy.copy_blocks(source, target, from_n, to_n, overlap=False, interpret=True)
    assert torch.equal(flat, twin_flat)


def test_zero_touches_its_blocks_only():
    flat, view = strided((2, 2, 7, 33), (1200, 400, 35, 1))
    twin_flat, twin = strided((2, 2, 7, 33), (1200, 400, 35, 1))
    blocks = torch.tensor([6, 0, 3])
    block_copy.zero_blocks(twin, blocks)
    block_copy.zero_blocks(view, blocks, interpret=True)
    assert torch.equal(flat, twin_flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("interpret", [False, True])
def test_plain_write_by_loop(dtype, head_first, interpret):
    """Strided values, strided pages, padding, and every other byte as it was."""
    blocks, size, heads, dim = 5, 4, 3, 6
    raw = torch.zeros(2000, dtype=torch.uint8).view(dtype)
    shape, strides = (
        ((blocks, heads, size, dim), (90, 28, 7, 1)) if head_first else ((blocks, size, heads, dim), (90, 21, 7, 1))
    )
    field = raw.as_strided(shape, strides)
    field = field.transpose(1, 2) if head_first else field
    values = torch.randn(7, 2, heads, dim, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)[:, 1]
    slots = torch.tensor([3, -1, 19, 8, -1, 0, 11])
    want = field.float().clone()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // size, slot % size] = values[t].to(dtype).float()
    before = raw.view(torch.uint8).clone()
    write_slots(field, values, slots, interpret=interpret)
    assert torch.equal(field.float(), want)
    own = torch.zeros(len(raw), dtype=torch.bool)
    own.as_strided(shape, strides).fill_(True)
    changed = (raw.view(torch.uint8) != before).view(len(raw), -1).any(1)
    assert not bool((changed & ~own).any())


def test_plain_write_of_a_field_with_one_axis():
    """A scale field, or a latent: (block, token, dim)."""
    field, values = torch.zeros(3, 4, 5), torch.arange(10.0).view(2, 5)
    write_slots(field, values, torch.tensor([9, 2]), interpret=True)
    assert field[2, 1].tolist() == values[0].tolist()
    assert field[0, 2].tolist() == values[1].tolist()
    assert int(field.count_nonzero()) == 9
