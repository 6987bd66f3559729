from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, IntegrityError, OutOfBlocksError
from kvcore.manage.block_list import BlockList
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.eviction import LRU, EvictionPolicy


def test_ids_start_at_one_and_the_null_block_is_never_given():
    pool = BlockPool(5)
    assert pool.take(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.num_pending) == (0, 4, 0)
    with pytest.raises(OutOfBlocksError):
        pool.take(1)


def test_a_failed_take_changes_nothing():
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.take(3)
    assert caught.value.got == 3
    assert pool.take(2) == [2, 3]


def test_never_cached_blocks_go_first_then_the_least_recently_used():
    evicted: list[int] = []
    pool = BlockPool(7, on_evict=evicted.append)
    blocks = pool.take(6)
    for block in (2, 4, 6):
        pool.set_cached(block)
    pool.release([6, 5, 4, 3, 2, 1], 0)
    assert pool.take(6) == [5, 3, 1, 6, 4, 2]
    assert evicted == [6, 4, 2]
    assert pool.evictions == 3
    assert blocks == [1, 2, 3, 4, 5, 6]


def test_a_hit_makes_a_block_recent():
    pool = BlockPool(4)
    pool.take(3)
    for block in (1, 2, 3):
        pool.set_cached(block)
    pool.release([1, 2, 3], 0)
    pool.share([1])
    pool.release([1], 0)
    assert pool.take(3) == [2, 3, 1]


def test_nothing_is_handed_out_before_its_step_retires():
    pool = BlockPool(4)
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
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block], 5)
    pool.release([block], 3)
    pool.retire(4)
    assert pool.num_free == 0
    pool.retire(5)
    assert pool.take(1) == [block]


def test_a_hit_revives_a_pending_block_and_a_later_release_counts_anew():
    pool = BlockPool(3)
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
    pool = BlockPool(3)
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
        BlockPool(0)


def corrupt_count(pool: BlockPool) -> None:
    pool.refs[1] += 1


def corrupt_state(pool: BlockPool) -> None:
    pool.refs[3] = 1


def corrupt_links(pool: BlockPool) -> None:
    pool._fresh._next[3] = 3


def corrupt_flag(pool: BlockPool) -> None:
    pool._cached[3] = 1


def corrupt_lost(pool: BlockPool) -> None:
    pool._fresh.remove(4)


def corrupt_pending(pool: BlockPool) -> None:
    pool._num_pending += 1


@pytest.mark.parametrize(
    "damage", [corrupt_count, corrupt_state, corrupt_links, corrupt_flag, corrupt_lost, corrupt_pending]
)
def test_every_planted_fault_is_found(damage):
    pool = BlockPool(6)
    pool.take(2)
    pool.release([2], 9)
    pool.check_integrity({1: 1})
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity({1: 1})


def test_holders_are_compared():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(IntegrityError):
        pool.check_integrity({1: 2})


class NewestFirst(EvictionPolicy):
    name = "newest_first"

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[int] = []

    def add(self, block: int) -> None:
        self.blocks.append(block)

    def remove(self, block: int) -> None:
        self.blocks.remove(block)

    def pop(self) -> int:
        return self.blocks.pop()

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return reversed(self.blocks)


class Liar(NewestFirst):
    name = "liar"

    def pop(self) -> int:
        self.blocks.pop()
        return 1


def filled(policy: type[EvictionPolicy]) -> BlockPool:
    pool = BlockPool(4, policy=policy)
    pool.take(3)
    for block in (2, 3):
        pool.set_cached(block)
    pool.release([2, 3], 0)
    return pool


def test_the_policy_chooses_the_victim():
    assert filled(LRU).take(2) == [2, 3]
    assert filled(NewestFirst).take(2) == [3, 2]


def test_a_policy_cannot_give_up_what_it_does_not_have():
    with pytest.raises(IntegrityError, match="Liar"):
        filled(Liar).take(1)


@given(st.lists(st.tuples(st.sampled_from(["append", "remove", "pop"]), st.integers(1, 7)), max_size=60))
def test_block_list_is_an_ordered_set(actions):
    mine, model = BlockList(8), []
    for action, block in actions:
        if action == "append" and block not in model:
            mine.append(block)
            model.append(block)
        elif action == "remove" and block in model:
            mine.remove(block)
            model.remove(block)
        elif action == "pop" and model:
            assert mine.pop_first() == model.pop(0)
        else:
            with pytest.raises(IntegrityError):
                {"append": mine.append, "remove": mine.remove}.get(action, lambda _: mine.pop_first())(block)
        assert (list(mine), len(mine), block in mine) == (model, len(model), block in model)


def test_a_full_list_holds_every_id_in_order():
    assert list(BlockList(5, full=True)) == [1, 2, 3, 4]
    assert list(BlockList(1, full=True)) == []
    assert list(BlockList(1)) == []
