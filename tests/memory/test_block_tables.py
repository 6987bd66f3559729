"""Block tables against a model made of lists."""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.errors import CapacityError, ConfigError, IntegrityError
from kvcore.memory.block_table import BlockTables, table_columns
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import hnd
from kvcore.spec.retention import Full, Window

CONTENT = KVHeads(1, 8, dtype="float16")
ROWS, COLUMNS = 4, 6


def tables_of(plans, kernel=4):
    """Two groups of 48 tokens at most: full at ratio 1, window at ratio 8 / kernel."""
    config = plans.make(
        [((0,), CONTENT, Full(), hnd(CONTENT), None), ((1,), CONTENT, Window(40), hnd(CONTENT), kernel)], blocks=64
    )
    return config, BlockTables(config, ROWS, 48, "cpu")


def kernel_blocks(ids, ratio):
    return [b * ratio + j for b in ids for j in range(ratio)]


actions = st.one_of(
    st.tuples(
        st.just("apply"),
        st.integers(0, 1),
        st.integers(0, ROWS - 1),
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.lists(st.integers(0, 65), max_size=7)),
    ),
    st.tuples(st.sampled_from(["clear"]), st.integers(0, ROWS - 1)),
    st.tuples(st.sampled_from(["swap", "move", "copy"]), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
    st.tuples(st.just("gather"), st.lists(st.integers(0, ROWS - 1), max_size=ROWS)),
)


def model_apply(model, group, row, drop, keep, ids):
    """The rule of the design, word for word; None where it must be refused."""
    blocks, first = model[row][group]
    fresh = blocks[drop:][:keep] + list(ids)
    if len(fresh) > COLUMNS or any(not 1 <= b < 64 for b in ids):
        return False
    model[row][group] = (fresh, first + drop)
    return True


# The fixtures only make things: nothing lives from one example to the next.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(actions, max_size=25))
def test_against_lists(plans, delta, steps):
    tables = tables_of(plans)[1]
    model = [[([], 0), ([], 0)] for _ in range(ROWS)]
    for name, *rest in steps:
        if name == "apply":
            group, row, (drop, keep, ids) = rest
            if model_apply(model, group, row, drop, keep, ids):
                tables.apply(group, row, delta(drop, keep, ids))
            else:
                with pytest.raises((IntegrityError, CapacityError)):
                    tables.apply(group, row, delta(drop, keep, ids))
        elif name == "clear":
            tables.clear(*rest)
            model[rest[0]] = [([], 0), ([], 0)]
        elif name == "swap":
            a, b = rest
            tables.swap(a, b)
            model[a], model[b] = model[b], model[a]
        elif name in ("copy", "move"):
            a, b = rest
            getattr(tables, name)(a, b)
            model[b] = copy.deepcopy(model[a])
            if name == "move" and a != b:
                model[a] = [([], 0), ([], 0)]
        check(tables, model, rest[0] if name == "gather" else range(ROWS))


def check(tables, model, rows):
    rows = list(rows)
    for row in range(ROWS):
        assert tables.blocks(row) == [blocks for blocks, _ in model[row]]
    for group, (found, ratio) in enumerate(zip(tables.gather(rows), (1, 2), strict=True)):
        for s, row in enumerate(rows):
            blocks, first = model[row][group]
            want = kernel_blocks(blocks, ratio)
            padded = want + [0] * (COLUMNS * ratio - len(want))
            assert found.table_host[s].tolist() == found.table_SN[s].tolist() == padded
            assert found.counts_host[s] == found.counts[s] == len(want)
            assert found.first_block_host[s] == found.first_block[s] == first * ratio


def test_tables_read_back(plans, delta):
    _, tables = tables_of(plans)
    tables.apply(0, 1, delta(0, 0, [37, 12, 44]))
    tables.apply(0, 3, delta(0, 0, [7, 2, 19]))
    found = tables.gather([3, 1])[0]
    assert found.table_SN[:, :4].tolist() == [[7, 2, 19, 0], [37, 12, 44, 0]]
    assert found.counts.tolist() == [3, 3]
    assert tables.blocks(1)[0] == [37, 12, 44]


def test_a_resumed_row_may_begin_in_the_middle(plans, delta):
    _, tables = tables_of(plans)
    tables.apply(1, 0, delta(3, 0, [9, 8]))
    found = tables.gather([0])[1]
    assert found.first_block.tolist() == [6]
    assert found.table_SN[0, :5].tolist() == [18, 19, 16, 17, 0]


def test_addresses_never_change_and_stale_columns_are_zeroed(plans, delta):
    _, tables = tables_of(plans)
    tables.apply(0, 0, delta(0, 0, [1, 2, 3, 4, 5, 6]))
    before = [t.data_ptr() for t in tables.gather([0, 1])[0][:3]]
    tables.apply(0, 0, delta(0, 1, []))
    found = tables.gather([0, 1])
    assert [t.data_ptr() for t in found[0][:3]] == before
    assert found[0].table_SN.tolist() == [[1, 0, 0, 0, 0, 0], [0] * 6]
    tables.apply(0, 1, delta(0, 0, [9, 8, 7]))
    tables.gather([1])
    # The row behind was written by earlier steps; it must not show through.
    assert tables.gather([1, 2])[0].table_SN.tolist() == [[9, 8, 7, 0, 0, 0], [0] * 6]


def test_a_refused_delta_changes_nothing(plans, delta):
    _, tables = tables_of(plans)
    tables.apply(0, 0, delta(0, 0, [1, 2]))
    for bad in (delta(1, 1, [64]), delta(1, 1, [0]), delta(0, 2, [3] * 5), delta(-1, 0, []), delta(0, -1, [])):
        with pytest.raises((IntegrityError, CapacityError)):
            tables.apply(0, 0, bad)
        assert tables.blocks(0)[0] == [1, 2]
        assert tables.groups[0].first_block[0] == 0


@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_out_of_range(plans, delta, row):
    _, tables = tables_of(plans)
    for call in (
        lambda: tables.apply(0, row, delta(0, 0, [])),
        lambda: tables.clear(row),
        lambda: tables.swap(0, row),
        lambda: tables.move(row, 0),
        lambda: tables.gather([row]),
        lambda: tables.blocks(row),
        lambda: tables.apply(2, 0, delta(0, 0, [])),
        lambda: tables.gather([0] * (ROWS + 1)),
    ):
        with pytest.raises(IntegrityError):
            call()


def test_null_blocks_of_packed_belong_to_nobody(plans, delta):
    config = plans.build("mixed_packed")
    tables = BlockTables(config, 2, 96, "cpu")
    for group in config.kv_cache_groups:
        last_null = group.blocks_per_large_page - 1
        with pytest.raises(IntegrityError, match=str(last_null)):
            tables.apply(group.index, 0, delta(0, 0, [last_null]))
        tables.apply(group.index, 0, delta(0, 0, [last_null + 1]))


def test_columns_follow_the_bound_of_the_retention(plans):
    config, _ = tables_of(plans)
    # Full: 6 blocks of 8 for 48 tokens. Window 40, 1 token a step: 40 live tokens touch at most 6.
    assert table_columns(config, 48, 48) == [6, 6]
    assert table_columns(config, 480, 1) == [60, 6]
    assert table_columns(config, 480, 32) == [60, 10]


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (4, 0)])
def test_impossible_tables(plans, rows, length):
    config, _ = tables_of(plans)
    with pytest.raises(ConfigError):
        BlockTables(config, rows, length, "cpu")


def test_host_and_device_of_a_cpu_are_the_same_bytes(plans, delta):
    _, tables = tables_of(plans)
    tables.apply(0, 0, delta(0, 0, [5]))
    found = tables.gather([0])[0]
    assert np.shares_memory(found.table_host, found.table_SN.numpy())
