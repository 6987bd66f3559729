"""The batch that kernels see, against plain loops over requests."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import CapacityError, ConfigError, IntegrityError, NotBuiltError
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, State
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd
from kvcore.spec.retention import Encoder, Full, Latest, Window

CONTENT = KVHeads(1, 8, dtype="float16")
ROWS, TOKENS, BLOCK = 6, 64, 8


def config_of(*retentions, kernels=(8, 4)):
    caches = {CacheId(i): KVCacheSpec(CONTENT, r) for i, r in enumerate(retentions)}
    offers = {
        CacheId(i): LayoutOffer("any", (LayoutOption(hnd(CONTENT), KernelBlocks(sizes=(k,))),), 63)
        for i, k in zip(range(len(retentions)), kernels, strict=False)
    }
    limits = Limits(200, TOKENS, ROWS)
    return plan(caches, offers, Budget(num_blocks=400), limits, block_size=BLOCK).configs[0]


CONFIG = config_of(Full(), Window(20))


def delta(drop, keep, ids):
    return SimpleNamespace(drop_front=drop, keep=keep, ids=ids)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_loops(data):
    size = data.draw(st.integers(1, 5))
    rows = data.draw(st.permutations(range(ROWS)))[:size]
    scheduled = data.draw(st.lists(st.integers(1, 12), min_size=size, max_size=size))
    computed = data.draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
    tables, builder = BlockTables(CONFIG, ROWS, 200, "cpu"), BatchBuilder(CONFIG, ROWS, TOKENS, "cpu")
    ids = iter(data.draw(st.permutations(range(1, 400))))
    held = [{}, {}]
    for row, more, done in zip(rows, scheduled, computed, strict=True):
        for group, first in ((0, 0), (1, max(0, done - 19) // BLOCK)):
            blocks = {i: next(ids) for i in range(first, -(-(done + more) // BLOCK))}
            held[group][row] = blocks
            tables.apply(group, row, delta(first, 0, list(blocks.values())))
    batch = builder.build(rows, scheduled, computed, tables)

    starts = [sum(scheduled[:s]) for s in range(size + 1)]
    lengths = [a + b for a, b in zip(scheduled, computed, strict=True)]
    for got, host, want in (
        (batch.query_start_loc, batch.query_start_loc_host, starts),
        (batch.seq_lens, batch.seq_lens_host, lengths),
        (batch.num_computed, batch.num_computed_host, computed),
    ):
        assert got.tolist() == host.tolist() == want
        assert (got.dtype, host.dtype) == (torch.int32, np.int32)
    assert (batch.num_tokens, batch.num_seqs) == (starts[-1], size)
    assert (batch.max_query_len, batch.max_seq_len) == (max(scheduled), max(lengths))
    positions = [p for n, c in zip(scheduled, computed, strict=True) for p in range(c, c + n)]
    assert builder.positions_T[: batch.num_tokens].tolist() == positions
    owners = [row for row, n in zip(rows, scheduled, strict=True) for _ in range(n)]
    for group, (part, kernel) in enumerate(zip(batch.groups, (8, 4), strict=True)):
        assert part.kernel_block_size == kernel
        slots = [held[group][row][p // BLOCK] * BLOCK + p % BLOCK for row, p in zip(owners, positions, strict=True)]
        assert part.slot_mapping_T.tolist() == slots
        firsts = [min(held[group][row]) * BLOCK // kernel for row in rows]
        assert part.first_block.tolist() == part.first_block_host.tolist() == firsts
        keys = [n - f * kernel for n, f in zip(lengths, firsts, strict=True)]
        assert part.kv_lens.tolist() == part.kv_lens_host.tolist() == keys
        assert part.max_kv_len == max(keys)
        assert part.counts.tolist() == [len(held[group][row]) * BLOCK // kernel for row in rows]


def started(rows=3, world=1, rank=0):
    tables = BlockTables(CONFIG, ROWS, 200, "cpu")
    for row in range(rows):
        for group in (0, 1):
            tables.apply(group, row, delta(0, 0, range(1 + 8 * row, 9 + 8 * row)))
    return tables, BatchBuilder(CONFIG, ROWS, TOKENS, "cpu", world=world, rank=rank)


@pytest.mark.parametrize(
    ("scheduled", "computed", "want"),
    [
        ([1, 1, 5], [4, 9, 0], 2),
        ([1, 1, 1], [4, 9, 2], 3),
        ([1, 3, 1], [4, 0, 7], 1),  # a one-token piece of a prefill behind the prefills
        ([1, 2, 2], [0, 1, 1], 0),  # a prompt of one token has no cached prefix
    ],
)
def test_decodes_are_the_leading_run(scheduled, computed, want):
    tables, builder = started()
    assert builder.build([0, 1, 2], scheduled, computed, tables).num_decodes == want


def test_addresses_stay_over_many_steps():
    tables, builder = started()
    seen = set()
    for step in range(200):
        count = 1 + step % 3
        batch = builder.build(list(range(count)), [1 + step % 4] * count, [step % 50] * count, tables)
        part = batch.groups[1]
        device = (
            batch.query_start_loc,
            batch.seq_lens,
            batch.num_computed,
            part.block_table_SN,
            part.counts,
            part.first_block,
            part.kv_lens,
            part.slot_mapping_T,
            builder.positions_T,
        )
        seen.add(tuple(t.data_ptr() for t in device))
    assert len(seen) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_interleaved_contexts(world):
    """Token i lies on rank i % world; the ranks' slots together are every token once."""
    scheduled, computed = [3, 9], [7, 11]
    everyone = np.zeros(12, int)
    for rank in range(world):
        tables, builder = started(2, world, rank)
        batch = builder.build([0, 1], scheduled, computed, tables)
        part = batch.groups[0]
        positions = [*range(7, 10), *range(11, 20)]
        slots = part.slot_mapping_T.tolist()
        everyone += np.array(slots) >= 0
        want = []
        for t, p in enumerate(positions):
            local, row = p // world, int(t >= 3)
            block = 1 + 8 * row + local // BLOCK
            want.append(block * BLOCK + local % BLOCK if p % world == rank else -1)
        assert slots == want
        assert part.kv_lens.tolist() == [len(range(rank, n, world)) for n in (10, 20)]
    assert (everyone == 1).all()


def test_the_dummy_batch_owns_nothing():
    tables, builder = started()
    batch = builder.dummy(16, 6, tables)
    assert batch.query_start_loc.diff().tolist() == [2, 2, 2, 2, 2, 6]
    for part in batch.groups:
        assert (part.block_table_SN == 0).all()
        assert (part.slot_mapping_T == -1).all()
        assert part.kv_lens.tolist() == [2, 2, 2, 2, 2, 6]
    # The tables themselves are as before.
    assert tables.blocks(1) == [list(range(9, 17))] * 2


def test_states_have_one_block_and_no_slots():
    state = State(("s",), ((4,),), ("float32",))
    caches = {CacheId(0): KVCacheSpec(CONTENT, Full()), CacheId(1): KVCacheSpec(state, Latest())}
    config = plan(caches, {}, Budget(num_blocks=20), Limits(64, 64, 4), block_size=BLOCK).configs[0]
    tables, builder = BlockTables(config, 4, 64, "cpu"), BatchBuilder(config, 4, 64, "cpu")
    tables.apply(0, 0, delta(0, 0, [3, 4]))
    tables.apply(1, 0, delta(0, 0, [7]))
    batch = builder.build([0], [9], [0], tables)
    assert batch.groups[1].block_table_SN.tolist() == [[7]]
    assert batch.groups[1].kv_lens.tolist() == [1]
    assert (batch.groups[1].slot_mapping_T == -1).all()


@pytest.mark.parametrize(
    ("rows", "scheduled", "computed", "error"),
    [
        ([], [], [], IntegrityError),
        ([0], [1, 1], [0], IntegrityError),
        ([0], [0], [5], IntegrityError),
        ([0], [1], [-1], IntegrityError),
        ([0], [65], [0], CapacityError),
        ([0] * 7, [1] * 7, [0] * 7, CapacityError),
        ([ROWS], [1], [0], IntegrityError),
        ([0], [2], [63], IntegrityError),  # 64 slots held
        ([3], [1], [0], IntegrityError),  # an empty row
    ],
)
def test_bad_steps_are_refused(rows, scheduled, computed, error):
    tables, builder = started()
    with pytest.raises(error):
        builder.build(rows, scheduled, computed, tables)


def test_bad_ranks_and_cross_attention_are_refused():
    with pytest.raises(ConfigError):
        BatchBuilder(CONFIG, 4, 64, "cpu", world=2, rank=2)
    with pytest.raises(NotBuiltError, match="cross attention"):
        BatchBuilder(config_of(Encoder(30), kernels=(8,)), 4, 64, "cpu")
