"""A step that grows by one request at a time: what it refuses, what makes it void, and what it costs."""

from __future__ import annotations

import pytest
from support.named_manager import ScheduledRequest, run

from kvcore.errors import IntegrityError, RequestError
from kvcore.spec.retention import Full, Window


def test_a_request_without_blocks_leaves_the_step_as_it_was(manager_of):
    manager = manager_of(blocks=6)  # five to hand out
    for name, length in (("a", 40), ("b", 60), ("c", 32)):
        manager.begin(name, [ord(name)] * length)
    step = manager.begin_step()
    assert step.try_add(ScheduledRequest("a", 40)) == 0
    assert step.try_add(ScheduledRequest("b", 60)) == 2  # three taken, four asked for, five there
    assert step.try_add(ScheduledRequest("c", 32)) == 0
    given = manager.allocate(step)
    assert list(given.deltas) == ["a", "c"]
    assert given.new_blocks == ((0, 1), (0, 2), (0, 3), (0, 4), (0, 5))
    assert manager.table("b", 0) == (0, [])
    manager.check_integrity()


def test_two_hits_of_one_free_prefix_revive_it_once(manager_of):
    manager = manager_of(blocks=5)  # four to hand out
    manager.begin("a", range(32))
    run(manager, ("a", 32), a=1)
    manager.free(["a"])
    for name in "bcd":
        manager.begin(name, range(33))
    step = manager.begin_step()
    assert [step.try_add(ScheduledRequest(name, 1)) for name in "bcd"] == [0, 0, 1]
    assert dict(manager.allocate(step).cached_tokens) == {"b": 32, "c": 32}
    manager.check_integrity()


def test_a_malformed_ask_leaves_the_step_as_it_was(manager_of):
    manager = manager_of(blocks=10)
    manager.begin("a", range(20))
    step = manager.begin_step()
    for wrong in (ScheduledRequest("x", 1), ScheduledRequest("a", 21), ScheduledRequest("a", 0)):
        with pytest.raises(RequestError):
            step.try_add(wrong)
    assert step.try_add(ScheduledRequest("a", 20)) == 0
    with pytest.raises(RequestError, match="twice"):
        step.try_add(ScheduledRequest("a", 20))
    assert manager.allocate(step).new_blocks == ((0, 1), (0, 2))


CHANGES = {
    "another step": lambda m: m.allocate([ScheduledRequest("b", 1)]),
    "a commit": lambda m: m.commit(1, {"b": [1]}),
    "a retirement": lambda m: m.retire(1),
    "a fork": lambda m: m.fork("b", ["child"]),
    "a free": lambda m: m.free(["b"]),
    "a free of who waits": lambda m: m.free(["a"]),
    "a reset": lambda m: m.reset_prefix_cache(),
    "a newer step": lambda m: m.begin_step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_is_void_once_blocks_change_hands(manager_of, change):
    manager = manager_of((Full(), 16), (Window(8), 16), blocks=20)
    manager.begin("a", range(20))
    manager.begin("b", range(9))
    manager.allocate([ScheduledRequest("b", 8)])
    step = manager.begin_step()
    assert step.try_add(ScheduledRequest("a", 20)) == 0
    CHANGES[change](manager)
    before = manager.stats()
    with pytest.raises(IntegrityError, match="changed hands"):
        manager.allocate(step)
    assert manager.stats() == before
    manager.check_integrity()


def test_a_step_is_allocated_once(manager_of):
    manager = manager_of()
    manager.begin("a", range(20))
    step = manager.begin_step()
    step.try_add(ScheduledRequest("a", 10))
    manager.allocate(step)
    with pytest.raises(IntegrityError):
        manager.allocate(step)


def test_what_reads_only_leaves_a_step_valid(manager_of):
    manager = manager_of()
    manager.begin("a", range(20))
    step = manager.begin_step()
    step.try_add(ScheduledRequest("a", 20))
    manager.begin("b", range(20))
    assert manager.lookup(["b"]) == [0]
    assert manager.blocks_short([ScheduledRequest("b", 20)]) == 0
    manager.check_integrity()
    assert step.try_add(ScheduledRequest("b", 20)) == 0
    assert list(manager.allocate(step).deltas) == ["a", "b"]
