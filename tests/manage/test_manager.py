from __future__ import annotations

import pytest
from support.named_manager import ScheduledRequest, TableDelta, run

from kvcore.errors import ConfigError, OutOfBlocksError, RequestError
from kvcore.manage.prefix.block_hash import Adapter, Multimodal
from kvcore.manage.watch.events import Cleared, Removed, Stored
from kvcore.spec.retention import Chunk, Full, Window


def test_forty_eight_tokens_take_three_blocks(manager_of):
    manager = manager_of()
    manager.begin("a", range(48))
    given = run(manager, ("a", 48), a=7)
    assert given.step == 1
    assert given.deltas == {"a": (TableDelta(0, 0, (1, 2, 3)),)}
    assert given.new_blocks == ((0, 1), (0, 2), (0, 3))
    assert given.cached_tokens == {"a": 0}
    assert manager.table("a", 0) == (0, [1, 2, 3])
    assert manager.num_computed("a") == 48
    # The 49th token opens the fourth block.
    assert run(manager, ("a", 1), a=8).deltas == {"a": (TableDelta(0, 3, (4,)),)}
    assert run(manager, ("a", 1), a=9).deltas == {"a": (TableDelta(0, 4, ()),)}


def test_a_hundred_requests_share_125_blocks(manager_of):
    manager = manager_of(blocks=1000)
    names = [f"r{i}" for i in range(100)]
    for i, name in enumerate(names):
        manager.begin(name, [*range(2000), 5000 + i, 5000 + i])
    run(manager, ("r0", 2002), r0=1)
    assert manager.lookup(names[1:]) == [2000] * 99
    given = run(manager, *[(name, 2) for name in names[1:]], **dict.fromkeys(names[1:], 1))
    assert set(given.cached_tokens.values()) == {2000}
    shared = manager.table("r0", 0)[1][:125]
    assert all(manager.table(name, 0)[1][:125] == shared for name in names)
    assert {manager._pool.refs[b] for b in shared} == {100}
    assert manager.stats()["blocks_used"] == 125 + 100
    assert manager.stats()["prefix_hit_tokens"] == 99 * 2000
    manager.check_integrity()
    manager.free(names)
    assert {manager._pool.refs[b] for b in shared} == {0}
    assert manager.stats()["blocks_free"] == 999
    manager.check_integrity()


def test_the_last_token_is_always_computed(manager_of):
    manager = manager_of()
    for name, length in (("a", 32), ("b", 32), ("c", 33)):
        manager.begin(name, range(length))
    run(manager, ("a", 32), a=1)
    assert manager.lookup(["b", "c"]) == [16, 32]


def test_equal_prompts_in_one_step_do_not_share_what_is_not_computed(manager_of):
    manager = manager_of()
    for name in "abc":
        manager.begin(name, range(40))
    given = manager.allocate([ScheduledRequest("a", 40), ScheduledRequest("b", 40)])
    assert given.cached_tokens == {"a": 0, "b": 0}
    assert not set(manager.table("a", 0)[1]) & set(manager.table("b", 0)[1])
    assert manager.lookup(["c"]) == [0]
    manager.commit(1, {"a": [1], "b": [1]})
    assert manager.lookup(["c"]) == [32]
    assert manager.stats()["blocks_cached"] == 2


def test_an_aborted_step_leaves_nothing_to_hit(manager_of):
    manager = manager_of(blocks=5)
    for name in "ab":
        manager.begin(name, range(40))
    manager.allocate([ScheduledRequest("a", 40)])
    manager.free(["a"])
    assert manager.stats()["blocks_pending"] == 3
    assert manager.blocks_short([ScheduledRequest("b", 40)]) == 2
    manager.commit(1, {"a": [5]})
    assert manager.lookup(["b"]) == [0]
    manager.retire(1)
    assert manager.blocks_short([ScheduledRequest("b", 40)]) == 0
    manager.check_integrity()


def test_a_refused_step_changes_nothing(manager_of):
    manager = manager_of(blocks=5)
    for name in "abc":
        manager.begin(name, [ord(name)] * 32)
    run(manager, ("a", 32), a=1)
    asks = [ScheduledRequest("b", 32), ScheduledRequest("c", 32), ScheduledRequest("a", 1)]
    before = manager.stats()
    assert manager.blocks_short(asks) == 3
    with pytest.raises(OutOfBlocksError):
        manager.allocate(asks)
    assert manager.stats() == before
    assert manager.table("b", 0) == (0, [])
    assert run(manager, ("b", 32), b=1).step == 2


def test_a_hit_on_a_free_block_is_counted_against_the_free_blocks(manager_of):
    manager = manager_of(blocks=4)
    manager.begin("a", range(32))
    run(manager, ("a", 32), a=1)
    manager.free(["a"])
    manager.begin("b", range(64))
    assert manager.stats()["blocks_free"] == 3
    assert manager.lookup(["b"]) == [32]
    assert manager.blocks_short([ScheduledRequest("b", 32)]) == 1  # two revived, two new, three free
    assert run(manager, ("b", 16)).cached_tokens == {"b": 32}
    manager.check_integrity()


def test_the_tail_of_a_freed_request_is_evicted_first_in_every_group(manager_of):
    manager = manager_of((Full(), 16), (Full(), 32), blocks=7)
    manager.begin("a", range(64))
    run(manager, ("a", 64), a=1)
    manager.free(["a"])
    manager.begin("b", [9])
    run(manager, ("b", 1))
    manager.begin("c", range(64))
    assert manager.stats()["evictions"] == 2
    assert manager.lookup(["c"]) == [32]


@pytest.mark.parametrize(
    ("retention", "size"),
    [(Window(48), 16), (Window(50), 16), (Window(7), 4), (Window(1), 4), (Chunk(64), 16), (Chunk(6), 4)],
)
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_windows_hold_the_bounded_blocks_up_to_twenty_windows(manager_of, retention, size, chunk):
    target = 20 * retention.size + 3
    manager = manager_of((retention, size), (Full(), 16), blocks=2 + 3 * target)
    manager.begin("a", range(target))
    row, given_twice, done = (0, []), set(), 0
    while done < target:
        scheduled = min(chunk, target - done)
        given = manager.allocate([ScheduledRequest("a", scheduled)])
        done += scheduled
        delta = given.deltas["a"][0]
        row = (row[0] + delta.drop_front, row[1][delta.drop_front :][: delta.keep] + list(delta.ids))
        assert row == manager.table("a", 0)
        assert len(row[1]) <= retention.blocks_for_step(done, scheduled, size)
        last = row[0] * size <= retention.first_needed(done - scheduled)
        assert last, "a block that the first query reads is gone"
        manager.commit(given.step, {"a": [0]} if done == target else {})
        assert len(manager.table("a", 0)[1]) <= retention.resident_blocks(done, size)
        manager.retire(given.step)
        given_twice.add(manager.stats()["blocks_used"])
    assert manager.stats()["blocks_used"] <= retention.resident_blocks(done, size) + -(-done // 16)
    manager.check_integrity()


def test_two_steps_in_flight(manager_of):
    manager = manager_of((Full(), 4), (Window(4), 4), blocks=20)
    manager.begin("a", range(8))
    manager.allocate([ScheduledRequest("a", 8)])
    second = manager.allocate([ScheduledRequest("a", 1)])  # its token is not known yet
    assert manager.num_computed("a") == 9
    # Token 8 sees 5 .. 8: the window's first block leaves the table with step 2, last read by step 1.
    assert second.deltas["a"][1].drop_front == 1
    gone = 3
    assert manager.table("a", 1)[0] == 1
    with pytest.raises(RequestError):
        manager.allocate([ScheduledRequest("a", 2)])
    manager.commit(1, {"a": [50]})
    assert manager.stats()["blocks_pending"] == 1
    manager.retire(1)
    assert manager.stats()["blocks_pending"] == 0
    assert manager._pool.refs[gone] == 0
    manager.commit(2, {"a": [51]})
    manager.begin("b", [*range(8), 50])
    assert manager.lookup(["b"]) == [8]
    manager.check_integrity()


def test_window_blocks_dropped_before_their_commit_can_still_be_hit(manager_of):
    manager = manager_of((Window(4), 4), blocks=20)
    manager.begin("a", range(16))
    manager.allocate([ScheduledRequest("a", 12)])
    manager.allocate([ScheduledRequest("a", 4)])
    assert manager.table("a", 0) == (2, [3, 4])
    manager.commit(1, {})
    manager.begin("b", range(5))
    assert manager.lookup(["b"]) == [4]
    manager.check_integrity()


def test_a_window_needs_only_its_tail(manager_of):
    manager = manager_of((Full(), 4), (Window(4), 4), blocks=13)
    manager.begin("a", range(16))
    run(manager, ("a", 16), a=1)
    manager.free(["a"])
    manager.begin("b", range(17))
    given = run(manager, ("b", 1), b=1)
    assert given.cached_tokens == {"b": 16}
    full, window = given.deltas["b"]
    assert (full.drop_front, len(full.ids)) == (0, 5)
    assert (window.drop_front, len(window.ids)) == (3, 2)
    assert manager.table("b", 1)[0] == 3


def test_fork_shares_and_copies_on_write(manager_of):
    manager = manager_of()
    manager.begin("a", range(20))
    manager.allocate([ScheduledRequest("a", 20)])
    manager.fork("a", ["b", "c"])  # they are part of step 1, and sample their own first token
    manager.commit(1, {"a": [100], "b": [101], "c": [102]})
    manager.retire(1)
    assert manager.table("b", 0) == manager.table("a", 0) == (0, [1, 2])
    assert manager.stats()["blocks_used"] == 2
    assert manager.blocks_short([ScheduledRequest(n, 1) for n in "abc"]) == 0
    given = manager.allocate([ScheduledRequest("b", 1), ScheduledRequest("a", 1), ScheduledRequest("c", 1)])
    assert given.copies == ((0, 2, 3), (0, 2, 4))  # the last writer keeps the block
    assert given.deltas == {
        "b": (TableDelta(0, 0, (1, 3)),),
        "a": (TableDelta(0, 1, (4,)),),
        "c": (TableDelta(0, 0, (1, 2)),),
    }
    assert given.cached_tokens == {}
    assert manager.stats()["copied_blocks"] == 2
    manager.commit(2, {n: [7] for n in "abc"})
    manager.check_integrity()


def test_the_source_of_a_copy_waits_for_the_copying_step(manager_of):
    manager = manager_of(blocks=4)
    manager.begin("a", range(8))
    run(manager, ("a", 8), a=1)
    manager.fork("a", ["b"])
    manager.allocate([ScheduledRequest("b", 1)])
    manager.free(["a"])
    assert manager.stats()["blocks_pending"] == 1  # block 1: a read it in step 1, the copy in step 2
    manager.retire(2)
    assert manager.stats()["blocks_free"] == 2
    manager.check_integrity()


def test_fork_of_a_token_that_is_not_known_is_refused(manager_of):
    manager = manager_of()
    manager.begin("a", range(8))
    manager.allocate([ScheduledRequest("a", 8)])
    manager.allocate([ScheduledRequest("a", 1)])
    with pytest.raises(RequestError):
        manager.fork("a", ["b"])
    manager.commit(1, {"a": [3]})
    manager.fork("a", ["b"])
    manager.commit(2, {"a": [4], "b": [5]})
    manager.check_integrity()


def test_a_preempted_request_comes_back_to_its_blocks(manager_of):
    manager = manager_of()
    manager.begin("a", range(40))
    run(manager, ("a", 40), a=77)
    manager.free(["a"])
    manager.begin("a", [*range(40), 77])
    given = run(manager, ("a", 9), a=78)
    assert given.cached_tokens == {"a": 32}
    assert given.deltas["a"] == (TableDelta(0, 0, (1, 2, 4)),)


def test_salt_adapter_and_namespace_isolate(manager_of):
    manager = manager_of()
    lora, image = Adapter(b"weights"), Multimodal(b"img", 16, 4)
    for i, (salt, extras) in enumerate([("", ()), ("s", ()), ("", (lora,)), ("weights", ()), ("", (image,))]):
        manager.begin(str(i), range(40), salt=salt, extras=extras)
    run(manager, ("0", 40))
    assert manager.lookup(["1", "2", "3", "4"]) == [0, 0, 0, 16]
    run(manager, ("2", 40))
    manager.begin("again", range(40), extras=[Adapter(b"weights")])
    assert manager.lookup(["3", "again"]) == [0, 32]


def test_without_prefix_caching_nothing_is_reused(manager_of):
    manager = manager_of(prefix_caching=False)
    for name in "ab":
        manager.begin(name, range(40))
    run(manager, ("a", 40))
    assert manager.lookup(["b"]) == [0]
    assert manager.stats()["blocks_cached"] == 0


def test_reset_keeps_what_ran_before_out_of_the_index(manager_of):
    manager = manager_of()
    for name in "abc":
        manager.begin(name, range(40))
    run(manager, ("a", 20))
    manager.reset_prefix_cache()
    run(manager, ("a", 20), a=1)
    assert manager.lookup(["b"]) == [0]
    run(manager, ("b", 40), b=1)
    assert manager.lookup(["c"]) == [32]
    run(manager, ("c", 8), c=1)
    # Also what a computed after the reset stands on tokens from before it.
    assert manager.table("c", 0)[1][:2] == manager.table("b", 0)[1][:2]
    manager.free(["c"])
    manager.begin("c", range(40))
    manager.free(["a", "b"])
    manager.reset_prefix_cache()
    assert manager.lookup(["c"]) == [0]
    assert manager.stats()["blocks_free"] == 99
    manager.check_integrity()


def test_events(manager_of):
    manager = manager_of((Full(), 4), blocks=4, events=True)
    manager.begin("a", range(9))
    run(manager, ("a", 9), a=1)
    first, second = manager.take_events()
    assert isinstance(first, Stored)
    assert (first.group, first.block, first.parent, first.tokens) == (0, 1, None, (0, 1, 2, 3))
    assert (second.block, second.parent, second.tokens) == (2, first.digest, (4, 5, 6, 7))
    manager.free(["a"])
    manager.begin("b", [9] * 8)
    run(manager, ("b", 8))
    removed, *stored = manager.take_events()
    assert removed == Removed(0, second.digest, 2)
    assert [e.block for e in stored] == [3, 2]
    manager.reset_prefix_cache()
    assert manager.take_events() == [Cleared()]
    assert manager.take_events() == []
    with pytest.raises(ConfigError, match="events=True"):
        manager_of().take_events()


def test_a_window_of_one_token_keeps_and_stores_nothing(manager_of):
    manager = manager_of((Window(1), 4), (Full(), 4), events=True)
    manager.begin("a", range(10))
    run(manager, ("a", 6))
    assert manager.table("a", 0) == (1, [])
    given = run(manager, ("a", 4), a=1)
    # Tokens 6 to 9 lie in blocks 1 and 2; the block that token 5 began was given up.
    assert given.deltas["a"][0][:2] == (1, 0)
    assert len(given.deltas["a"][0].ids) == 2
    assert {event.group for event in manager.take_events()} == {1}
    manager.begin("b", range(10))
    assert manager.lookup(["b"]) == [8]
