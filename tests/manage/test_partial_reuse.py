"""Hits that end inside a block: worked examples; `test_perfect_model` has all others."""

from __future__ import annotations

import pytest

from kvcore.manage.allocation import StepAllocation
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.prefix.block_hash import Embeddings
from kvcore.spec.retention import Chunk, Full, Window


def serve(manager: KVCacheManager, tokens: list[int], **facts) -> StepAllocation:
    """One request from beginning to end."""
    row = manager.begin(tokens, **facts)
    step = manager.begin_step()
    assert step.try_add(row, len(tokens) - manager.lookup(row)) == 0
    given = manager.allocate(step)
    manager.commit(given.step)
    manager.retire(given.step)
    manager.free([row])
    return given


def hit(manager: KVCacheManager, tokens: list[int], **facts) -> int:
    row = manager.begin(tokens, **facts)
    found = manager.lookup(row)
    manager.free([row])
    return found


TEXT = list(range(1, 13))


@pytest.fixture
def manager(config_of):
    """Three cached blocks of four tokens."""
    made = KVCacheManager(config_of([(Full(), 4)], 8), partial_reuse=True)
    serve(made, TEXT)
    return made


def test_the_longest_beginning_is_copied(manager):
    serve(manager, [1, 2, 3, 4, 5, 6, 99, 99])
    given = serve(manager, [*TEXT[:7], 50])
    assert given.starts.tolist() == [7]
    (group, source, target), *more = given.copies.tolist()
    assert (group, source) == (0, 2)
    assert target not in (1, 2, 3, 4)
    assert not more


def test_all_but_the_last_token_of_a_cached_prompt(manager):
    assert hit(manager, TEXT) == 11
    assert hit(manager, TEXT[:6]) == 5
    assert hit(manager, [7, *TEXT]) == 0


def test_conditions_count(manager):
    """Nobody shares a beginning with another tenant, nor over an image: there equal ids say nothing."""
    assert hit(manager, TEXT[:6], salt="other") == 0
    assert hit(manager, TEXT[:7], extras=[Embeddings(b"a picture", 5, 1)]) == 4
    serve(manager, TEXT, salt="tenant", extras=[Embeddings(b"a picture", 1, 2)])
    assert hit(manager, TEXT[:7], salt="tenant") == 0


def test_a_full_pool_takes_whole_blocks_alone(config_of):
    """Four blocks, all of them needed: none is left to copy from."""
    manager = KVCacheManager(config_of([(Full(), 4)], 5), partial_reuse=True)
    serve(manager, TEXT[:8])
    prompt = [*TEXT[:6], *range(50, 60)]
    row = manager.begin(prompt)
    assert manager.lookup(row) == 6
    step = manager.begin_step()
    assert step.try_add(row, 10) == 0
    given = manager.allocate(step)
    assert (given.starts.tolist(), given.ends.tolist(), len(given.copies)) == ([4], [14], 0)


def test_what_is_forgotten_is_not_copied(manager):
    manager.reset_prefix_cache()
    assert hit(manager, TEXT) == 0


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(Full(), 4), (Full(), 6)], 10),
        ([(Full(), 4), (Window(3), 4)], 10),
        ([(Chunk(5), 4)], 10),  # at 10 a chunk begins: nothing is read, nothing copied
    ],
)
def test_unlike_groups(config_of, groups, expected):
    manager = KVCacheManager(config_of(groups, 20), partial_reuse=True)
    serve(manager, TEXT)
    given = serve(manager, [*TEXT[:10], 70, 71])
    assert given.starts.tolist() == [expected]
    read = [group for group, (kept, size) in enumerate(groups) if expected % size and kept.first_needed(10) < 10]
    assert given.copies[:, 0].tolist() == read


def test_a_block_begun_where_a_chunk_begins_is_not_found_again(config_of):
    """It lacks the tokens before the chunk, which a hit that ends among them would read."""
    manager = KVCacheManager(config_of([(Chunk(4), 6)], 20), partial_reuse=True)
    text = TEXT[:7]
    assert serve(manager, text).starts.tolist() == [4]
    assert hit(manager, text) == 4
    assert hit(manager, text[:3]) == 0
