"""Slot mapping and the index arithmetic of a step against plain loops, and the worked examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.memory.kernels.slot_mapping import slot_mapping
from kvcore.memory.slot_mapping import check_ranks, dummy_split, local_length, query_start_loc, token_positions

ONE_TOKEN = torch.tensor([0, 1], dtype=torch.int32)


def loop(tables, firsts, scheduled, computed, block_size, world, rank):
    """Token by token."""
    slots = []
    for table, first, count, done in zip(tables, firsts, scheduled, computed, strict=True):
        for position in range(done, done + count):
            if position % world != rank:
                slots.append(-1)
                continue
            local = position // world
            slots.append(table[local // block_size - first] * block_size + local % block_size)
    return slots


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_against_a_loop(data):
    world = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world - 1))
    block_size = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, 5))
    scheduled = data.draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    computed = data.draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    tables, firsts = [], []
    for done, more in zip(computed, scheduled, strict=True):
        before, after = local_length(np.int32([done, done + more]), world, rank).tolist()
        held = -(-after // block_size)
        # Anything before the first scheduled token may have left the table.
        first = data.draw(st.integers(0, min(held, before // block_size)))
        firsts.append(first)
        tables.append(data.draw(st.lists(st.integers(1, 2**24), min_size=held - first, max_size=held - first)))
    columns = max(1, *map(len, tables)) + data.draw(st.integers(0, 2))
    padded = torch.tensor([t + [0] * (columns - len(t)) for t in tables], dtype=torch.int32)
    out = torch.full((sum(scheduled),), -7, dtype=torch.int64)
    slot_mapping(
        padded,
        torch.tensor(firsts, dtype=torch.int32),
        torch.from_numpy(query_start_loc(scheduled)),
        torch.tensor(computed, dtype=torch.int32),
        block_size,
        out,
        world=world,
        rank=rank,
    )
    assert out.tolist() == loop(tables, firsts, scheduled, computed, block_size, world, rank)


def test_slots_do_not_overflow_int32():
    out = torch.zeros(1, dtype=torch.int64)
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    slot_mapping(table, zero, ONE_TOKEN, torch.tensor([15], dtype=torch.int32), 16, out)
    assert out.item() == (2**31 - 1) * 16 + 15


@given(st.integers(0, 200), st.integers(1, 8))
def test_local_lengths(tokens, world):
    for rank in range(world):
        assert local_length(np.int32([tokens]), world, rank).tolist() == [sum(i % world == rank for i in range(tokens))]


def test_worked_examples():
    out = torch.zeros(1, dtype=torch.int64)
    table = torch.tensor([[37, 12, 44]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    slot_mapping(table, zero, ONE_TOKEN, torch.tensor([7], dtype=torch.int32), 16, out)
    assert out.tolist() == [599]
    assert query_start_loc([2, 3, 1]).tolist() == [0, 2, 5, 6]
    assert query_start_loc([2, 5, 3])[1:].tolist() == [2, 7, 10]
    assert token_positions([2, 5, 3], [0, 0, 0]).tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert dummy_split(16, 6) == [2, 2, 2, 2, 2, 6]


@given(st.integers(1, 300), st.integers(1, 40))
def test_dummy_batches_use_every_token(tokens, seqs):
    if tokens < seqs:
        with pytest.raises(ConfigError):
            dummy_split(tokens, seqs)
        return
    split = dummy_split(tokens, seqs)
    assert (sum(split), len(split)) == (tokens, seqs)
    assert min(split) >= 1
    assert len(set(split[:-1])) <= 1


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_ranks_are_checked(world, rank):
    with pytest.raises(ConfigError):
        check_ranks(world, rank)
