from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, IntegrityError, OutOfBlocksError
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.policies.block_queue import BlockQueue
from kvcore.manage.policies.eviction import LFU, LRU, Cost, EvictionPolicy


class ListPool(BlockPool):
    """The pool by lists."""

    def take(self, count):
        return super().take(np.zeros(count, np.int64)).tolist()

    def share(self, blocks):
        super().share(np.array(blocks))

    def release(self, blocks, last_reader):
        super().release(np.array(blocks), last_reader)

    def set_cached(self, block):
        super().set_cached(np.array([block]))


def test_ids_start_at_one_and_the_null_block_is_never_given():
    pool = ListPool(5)
    assert pool.take(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.num_pending) == (0, 4, 0)
    with pytest.raises(OutOfBlocksError):
        pool.take(1)


def test_a_failed_take_changes_nothing():
    pool = ListPool(4)
    pool.take(1)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.take(3)
    assert caught.value.got == 3
    assert pool.take(2) == [2, 3]


def test_never_cached_blocks_go_first_then_the_least_recently_used():
    evicted: list[int] = []
    pool = ListPool(7, on_evict=lambda blocks: evicted.extend(blocks.tolist()))
    blocks = pool.take(6)
    for block in (2, 4, 6):
        pool.set_cached(block)
    pool.release([6, 5, 4, 3, 2, 1], 0)
    assert pool.take(6) == [5, 3, 1, 6, 4, 2]
    assert evicted == [6, 4, 2]
    assert pool.evictions == 3
    assert blocks == [1, 2, 3, 4, 5, 6]


def test_a_hit_makes_a_block_recent():
    pool = ListPool(4)
    pool.take(3)
    for block in (1, 2, 3):
        pool.set_cached(block)
    pool.release([1, 2, 3], 0)
    pool.share([1])
    pool.release([1], 0)
    assert pool.take(3) == [2, 3, 1]


def test_nothing_is_handed_out_before_its_step_retires():
    pool = ListPool(4)
    pool.take(3)
    pool.release([3], 2)
    pool.release([2], 1)
    assert (pool.num_free, pool.num_pending) == (0, 2)
    pool.retire(1)
    assert pool.take(1) == [2]
    with pytest.raises(OutOfBlocksError):
        pool.take(1)
    pool.retire(2)
    assert pool.take(1) == [3]


def test_the_latest_reader_of_any_holder_counts():
    pool = ListPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block], 5)
    pool.release([block], 3)
    pool.retire(4)
    assert pool.num_free == 0
    pool.retire(5)
    assert pool.take(1) == [block]


def test_a_hit_revives_a_pending_block_and_a_later_release_counts_anew():
    pool = ListPool(3)
    pool.take(2)
    pool.set_cached(1)
    pool.release([1, 2], 1)
    pool.share([1])
    assert (pool.num_used, pool.num_pending) == (1, 1)
    pool.release([1], 1)  # the same step again: it is now released after block 2
    pool.check_integrity({})
    pool.retire(1)
    assert pool.num_free == 2
    pool.check_integrity({})
    pool.share([1])
    pool.release([1], 7)
    pool.retire(6)
    assert pool.num_pending == 1
    pool.check_integrity({})


def test_double_free_and_the_null_block_are_refused():
    pool = ListPool(3)
    pool.take(1)
    pool.release([1], 0)
    for block in (1, 0):
        with pytest.raises(IntegrityError):
            pool.release([block], 0)
    with pytest.raises(IntegrityError):
        pool.share([0])
    with pytest.raises(IntegrityError):
        pool.set_cached(1)
    with pytest.raises(ConfigError):
        ListPool(0)


def corrupt_count(pool: ListPool) -> None:
    pool.refs[1] += 1


def corrupt_state(pool: ListPool) -> None:
    pool.refs[3] = 1


def corrupt_links(pool: ListPool) -> None:
    pool._place[3] = pool._place[4]


def corrupt_flag(pool: ListPool) -> None:
    pool._cached[3] = True


def corrupt_lost(pool: ListPool) -> None:
    pool._fresh.remove(np.array([4]))


def corrupt_pending(pool: ListPool) -> None:
    pool._num_pending += 1


@pytest.mark.parametrize(
    "damage", [corrupt_count, corrupt_state, corrupt_links, corrupt_flag, corrupt_lost, corrupt_pending]
)
def test_every_planted_fault_is_found(damage):
    pool = ListPool(6)
    pool.take(2)
    pool.release([2], 9)
    pool.check_integrity({1: 1})
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity({1: 1})


def test_holders_are_compared():
    pool = ListPool(3)
    pool.take(1)
    with pytest.raises(IntegrityError):
        pool.check_integrity({1: 2})


class Never(EvictionPolicy):
    """Block 2 stays a lifetime longer than others."""

    name: ClassVar[str] = "never"
    levels: ClassVar[int] = 2

    def level(self, hits, reach):
        return (reach == 7).astype(int)


class Liar(Never):
    name: ClassVar[str] = "liar"

    def level(self, hits, reach):
        return hits.astype(int) + 2


def filled(policy: type[EvictionPolicy]) -> ListPool:
    pool = ListPool(4, policy=policy)
    pool.take(3)
    for block in (2, 3):
        pool.set_cached(block)
    BlockPool.release(pool, np.array([2, 3]), 0, np.array([7, 1]))
    return pool


def test_the_policy_chooses_the_victim():
    assert filled(LRU).take(2) == [2, 3]
    assert filled(Never).take(2) == [3, 2]


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(IntegrityError, match="level"):
        filled(Liar)


def freed(policy: type[EvictionPolicy], histories: list[tuple[int, int]], order: list[int]) -> list[int]:
    """Victims in order, of blocks 1, 2, ... with these (hits, tokens of the longest reader), freed in `order`."""
    pool = ListPool(len(histories) + 1, policy=policy)
    for block, (hits, _) in enumerate(histories, 1):
        pool.take(1)
        pool.set_cached(block)
        for _ in range(hits):
            pool.share([block])
    for block in order:
        hits, reach = histories[block - 1]
        BlockPool.release(pool, np.array([block] * (hits + 1)), 0, reach)
    pool.check_integrity({})
    return pool.take(len(histories))


def test_lfu_keeps_what_was_hit_a_lifetime_longer_for_each_hit():
    assert freed(LFU, [(0, 9), (2, 9), (1, 9), (0, 9)], [1, 2, 3, 4]) == [1, 4, 3, 2]
    # Time counts as well: two hits are two lifetimes of five blocks, and a sixth of the blocks freed since is none.
    assert freed(LFU, [(1, 9), (1, 9), (0, 9)], [2, 1, 3]) == [3, 2, 1]


def test_cost_keeps_what_was_hit_and_is_dear():
    histories = [(0, 10**6), (1, 100), (1, 100_000), (0, 5)]
    assert freed(Cost, histories, [3, 2, 1, 4]) == [1, 4, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["append", "remove", "pop"]), st.integers(1, 7)), max_size=60))
def test_block_queue_is_an_ordered_set(actions):
    place = np.full(8, -1, np.int32)
    mine, model = BlockQueue(place, 3, place[:0]), []
    for action, block in actions:
        if action == "append" and block not in model:
            mine.append(np.array([block]))
            model.append(block)
        elif action == "remove" and block in model:
            mine.remove(np.array([block]))
            model.remove(block)
        elif action == "pop" and model:
            count = 1 + block % len(model)
            assert mine.pop(count).tolist() == model[:count]
            del model[:count]
        assert (list(mine), len(mine)) == (model, len(model))


def test_a_queue_is_packed_when_its_buffer_is_full():
    """Thousands pass through a queue of few, with holes; its order and its size stay."""
    rng = np.random.default_rng(0)
    place = np.full(50, -1, np.int32)
    mine, model = BlockQueue(place, 1, np.arange(1, 40, dtype=np.int32)), list(range(1, 40))
    for _ in range(3000):
        gone = rng.choice(model, 3, replace=False)
        mine.remove(gone)
        model = [b for b in model if b not in gone]
        first = mine.pop(2)
        assert first.tolist() == model[:2]
        model = [*model[2:], *gone.tolist(), *first.tolist()]
        mine.append(np.concatenate((gone, first)))
        assert list(mine) == model
    assert len(mine._buffer) < 1000
