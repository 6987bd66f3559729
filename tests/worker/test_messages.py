"""Messages between engine and workers are integers in msgpack, and come back as they went."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.manage.allocation import TableDeltas
from kvcore.worker.messages import Entry, SampleAsk, SchedulerOutput

ids = st.integers(0, 2**31 - 1)
arrays = st.lists(ids, max_size=5).map(lambda numbers: np.array(numbers, np.int32))
shares, some = st.floats(0, 2), st.lists(ids, max_size=3).map(tuple)
asks = st.builds(
    SampleAsk, shares, shares, ids, ids, ids, shares, shares, shares, shares, some, some, some, st.none() | ids
)
entries = st.builds(Entry, ids, st.text(min_size=1, max_size=8), asks, ids, st.booleans())


def tables(width):
    return st.lists(st.tuples(*[ids] * width), max_size=3).map(lambda n: np.array(n, np.int32).reshape(-1, width))


outputs = st.builds(
    SchedulerOutput,
    ids,
    *[arrays] * 6,
    st.builds(TableDeltas, *[arrays] * 6),
    arrays,
    st.lists(entries, max_size=3).map(tuple),
    tables(3),
    tables(2),
    tables(2),
    tables(2),
)


def plain(value):
    """A message as lists, to compare."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int32
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, tuple) else value


@given(outputs)
def test_round_trip(output):
    assert plain(SchedulerOutput.from_bytes(output.to_bytes())) == plain(output)


@given(outputs)
def test_only_plain_data_travels(output):
    def is_plain(value):
        if isinstance(value, list):
            return all(is_plain(v) for v in value)
        return value is None or isinstance(value, int | float | str | bool | bytes)

    assert is_plain(msgpack.unpackb(output.to_bytes()))


def test_arrays_travel_as_they_lie():
    output = SchedulerOutput(1, rows=np.array([1, 256], np.int32))
    assert b"\x01\x00\x00\x00\x00\x01\x00\x00" in output.to_bytes()


def test_tokens_are_counted():
    assert SchedulerOutput(1, token_ids=np.arange(6, dtype=np.int32)).num_tokens == 6


def test_a_tensor_cannot_be_packed():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError):
        SchedulerOutput(1, rows=torch.tensor([1, 2])).to_bytes()
