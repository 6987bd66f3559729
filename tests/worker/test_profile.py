"""The memory profile is arithmetic; the expected values are a published example's."""

import pytest

from kvcore.errors import CapacityError
from kvcore.worker.profile import MemoryProfile, MemorySnapshot, cache_bytes, profile

GIB = 1 << 30


def test_weights_activations_and_the_rest_add_up():
    assert MemoryProfile(2 * GIB, 2 * GIB, 1 * GIB).non_cache == 5 * GIB


def test_snapshots_give_the_profile():
    before = MemorySnapshot(allocated=0, peak=0, reserved=0, used=1 * GIB)
    loaded = MemorySnapshot(allocated=2 * GIB, peak=2 * GIB, reserved=2 * GIB, used=3 * GIB)
    after = MemorySnapshot(allocated=2 * GIB, peak=4 * GIB, reserved=4 * GIB, used=6 * GIB)
    use = profile(before, loaded, after)
    assert (use.weights, use.activations, use.non_torch) == (2 * GIB, 2 * GIB, 1 * GIB)
    assert use.non_cache == 5 * GIB


def test_a_neighbour_that_frees_memory_is_not_credited_to_us():
    before = MemorySnapshot(allocated=0, peak=0, reserved=0, used=8 * GIB)
    loaded = MemorySnapshot(allocated=2 * GIB, peak=2 * GIB, reserved=2 * GIB, used=4 * GIB)
    after = MemorySnapshot(allocated=2 * GIB, peak=3 * GIB, reserved=3 * GIB, used=4 * GIB)
    assert profile(before, loaded, after).non_torch == 0


@pytest.mark.parametrize(("count_graphs", "left"), [(True, 13), (False, 14)])
def test_graphs_count_behind_a_switch(count_graphs, left):
    use = MemoryProfile(weights=6, graphs=1)
    assert cache_bytes(20, 1.0, use, count_graphs=count_graphs) == left


def test_nothing_left_is_an_error_with_the_bytes():
    with pytest.raises(CapacityError) as error:
        cache_bytes(10, 0.5, MemoryProfile(weights=6))
    assert error.value.field == "cache.utilization"
    assert "6 bytes" in str(error.value)
