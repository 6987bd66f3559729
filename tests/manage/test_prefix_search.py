"""The longest prefix of all groups, against trying every length."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import IntegrityError
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix.prefix_cache import PrefixCache
from kvcore.spec.retention import Chunk, Full, Retention, Window

retentions = st.one_of(st.just(Full()), st.integers(1, 9).map(Window), st.integers(1, 9).map(Chunk))
groups = st.lists(st.tuples(retentions, st.sampled_from([1, 2, 3, 4, 6])), min_size=1, max_size=4)


def by_definition(shape: list[tuple[Retention, int]], present: set[tuple[int, int]], limit: int) -> int:
    """Every length in turn: each group must have each block with a token that the next query reads."""

    def served(n: int) -> bool:
        return all(
            n % size == 0 and all((g, j // size) in present for j in range(retention.first_needed(n), n))
            for g, (retention, size) in enumerate(shape)
        )

    return max(n for n in range(limit + 1) if n == 0 or served(n))


def filled(shape, present, tokens):
    """A cache with these (group, block index) present; digest i stands for run i."""
    rules = [GroupRule(i, size, retention) for i, (retention, size) in enumerate(shape)]
    cache = PrefixCache(rules, len(present) + 1)
    run = math.gcd(*(size for _, size in shape))
    digests = [bytes([i]) for i in range(tokens // run)]
    where = {}
    for block, (g, index) in enumerate(sorted(present), start=1):
        cache.insert(g, [digests[(index + 1) * shape[g][1] // run - 1]], [block])
        where[g, index] = block
    return cache, digests, where


def check_against_definition(shape, tokens, gone) -> None:
    everything = {(g, b) for g, (_, size) in enumerate(shape) for b in range(tokens // size)}
    present = everything - gone
    cache, digests, where = filled(shape, present, tokens)
    hit = cache.find(digests, tokens)
    assert hit.tokens == by_definition(shape, present, tokens)
    for g, (retention, size) in enumerate(shape):
        needed = [b for b in range(hit.tokens // size) if (b + 1) * size > retention.first_needed(hit.tokens)]
        assert hit.blocks[g] == [where[g, b] for b in needed]
        assert hit.first_blocks[g] == retention.first_needed(hit.tokens) // size


@given(groups, st.integers(0, 40), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=5))
def test_longest_prefix_by_definition(shape, tokens, gone):
    check_against_definition(shape, tokens, gone)


def test_longest_prefix_after_random_evictions():
    rng = random.Random(0)
    kinds = [Full, lambda: Window(rng.randint(1, 9)), lambda: Chunk(rng.randint(1, 9))]
    for _ in range(3000):
        shape = [(rng.choice(kinds)(), rng.choice((1, 2, 3, 4, 6))) for _ in range(rng.randint(1, 4))]
        gone = {(rng.randrange(4), rng.randrange(20)) for _ in range(rng.randint(0, 8))}
        check_against_definition(shape, rng.randint(0, 40), gone)


def test_all_subsets_of_three_small_groups():
    """Exhaustive: every set of present blocks, with a window and a chunk beside a full group (A42)."""
    for shape in (
        [(Full(), 2), (Window(3), 2), (Chunk(4), 2)],
        [(Full(), 4), (Window(3), 2)],
        [(Window(2), 1), (Window(5), 2), (Chunk(6), 3)],
    ):
        tokens = 6 if len(shape) == 3 else 8
        everything = [(g, b) for g, (_, size) in enumerate(shape) for b in range(tokens // size)]
        for mask in range(2 ** len(everything)):
            present = {e for i, e in enumerate(everything) if mask >> i & 1}
            cache, digests, _ = filled(shape, present, tokens)
            assert cache.longest(digests, tokens) == by_definition(shape, present, tokens)


def test_the_first_of_equal_blocks_stays():
    cache = PrefixCache([GroupRule(0, 2, Full())], 4)
    assert cache.insert(0, [b"d", b"e", b"d"], [1, 3, 2]).tolist() == [1, 3]
    assert cache.get(0, b"d") == 1
    assert cache.remove([1]) == [(0, b"d")]
    assert cache.get(0, b"d") is None


def test_contradictions_are_refused():
    cache = PrefixCache([GroupRule(0, 2, Full())], 4)
    cache.insert(0, [b"d"], [1])
    with pytest.raises(IntegrityError):
        cache.remove([2])
    assert cache.clear().tolist() == [1]
    assert len(cache) == 0
