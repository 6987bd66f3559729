"""Messages between engine and workers are integers in msgpack, and come back as they went."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.manage.step import TableDelta
from kvcore.worker.messages import SampleAsk, ScheduledRow, SchedulerOutput

ids = st.integers(0, 2**31 - 1)
deltas = st.builds(TableDelta, ids, ids, st.lists(ids, max_size=4).map(tuple))
shares, some = st.floats(0, 2), st.lists(ids, max_size=3).map(tuple)
asks = st.builds(
    SampleAsk, shares, shares, ids, ids, ids, shares, shares, shares, shares, some, some, some, st.none() | ids
)
rows = st.builds(
    ScheduledRow,
    st.text(min_size=1, max_size=8),
    st.lists(ids, min_size=1, max_size=5).map(tuple),
    ids,
    st.lists(deltas, max_size=3).map(tuple),
    st.lists(asks, max_size=2).map(tuple),
    st.booleans(),
)
outputs = st.builds(
    SchedulerOutput,
    ids,
    st.lists(rows, max_size=3).map(tuple),
    st.lists(st.text(max_size=5), max_size=3).map(tuple),
    st.lists(st.tuples(ids, ids, ids), max_size=3).map(tuple),
    st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
)


@given(outputs)
def test_round_trip(output):
    assert SchedulerOutput.from_bytes(output.to_bytes()) == output


@given(outputs)
def test_only_plain_data_travels(output):
    def plain(value):
        if isinstance(value, list):
            return all(plain(v) for v in value)
        return value is None or isinstance(value, int | float | str | bool)

    assert plain(msgpack.unpackb(output.to_bytes()))


def test_tokens_are_counted():
    row = ScheduledRow("a", (1, 2, 3), 0, ())
    assert SchedulerOutput(1, (row, row)).num_tokens == 6


def test_a_tensor_cannot_be_packed():
    torch = pytest.importorskip("torch")
    row = ScheduledRow("a", torch.tensor([1, 2]), 0, ())
    with pytest.raises(TypeError):
        SchedulerOutput(1, (row,)).to_bytes()
