"""What the plan promises is what manager and arena hold, under both placements."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcore.errors import OutOfBlocksError
from kvcore.manage.manager import KVCacheManager
from kvcore.plan.capacity import Capacity, Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.plan.stages import RankLayout
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, State
from kvcore.spec.retention import Chunk, Full, Latest, Retention, Window

STATE = KVCacheSpec(State(("s",), ((50,),), ("float32",)), Latest())
keeping = st.one_of(st.just(Full()), st.builds(Window, st.integers(1, 40)), st.builds(Chunk, st.integers(1, 40)))
unlike = st.lists(st.tuples(keeping, st.integers(1, 7)), min_size=1, max_size=3)
placements = st.sampled_from(["slots", "packed"])
BLOCK = 4


def caches_of(kinds: list[tuple[Retention, int]], states: int = 0) -> dict[CacheId, KVCacheSpec]:
    """Layers of so many KV heads, and some with a state."""
    specs = [KVCacheSpec(KVHeads(heads, 8), retention) for retention, heads in kinds] + [STATE] * states
    return {CacheId(i): s for i, s in enumerate(specs)}


def with_units(caches: dict[CacheId, KVCacheSpec], limits: Limits, placement: str, units: int) -> Plan:
    """A plan of so many ids, or large pages, besides the null ones."""
    asked = {"limits": limits, "placement": placement, "block_size": BLOCK}
    unit = plan(caches, {}, Budget(memory=1), **asked).capacity
    return plan(caches, {}, Budget(memory=unit.arena_bytes(units + 1)), **asked)


class Driven:
    """A manager that computes prompts in chunks, without prefix caching."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.manager = KVCacheManager(config, prefix_caching=False)

    def begin(self, tokens: int) -> int:
        return self.manager.begin(np.zeros(tokens, np.int64))

    def grow(self, row: int, count: int) -> None:
        """One step; `OutOfBlocksError` where it cannot be had."""
        step = self.manager.begin_step()
        if step.try_add(row, count):
            raise OutOfBlocksError("short", field="blocks", got=count)
        given = self.manager.allocate(step)
        self.manager.commit(given.step)
        self.manager.retire(given.step)

    def run(self, tokens: int, most: int, rng: random.Random) -> None:
        """One request to its end, in chunks of at most `most`."""
        row, done = self.begin(tokens), 0
        while done < tokens:
            chunk = min(tokens - done, rng.choice((most, rng.randint(1, most))))
            self.grow(row, chunk)
            done += chunk


@settings(max_examples=50)
@given(unlike, st.integers(0, 2), placements, st.integers(1, 60), st.integers(1, 30), st.integers(0, 99))
def test_what_fits_is_admitted_however_it_is_cut(
    kinds: list[tuple[Retention, int]], states: int, placement: str, units: int, most: int, seed: int
) -> None:
    made = with_units(caches_of(kinds, states), Limits(1000, most, 4), placement, units)
    longest = min(made.capacity.longest(), 300)
    assume(longest)
    driven = Driven(made.configs[0])
    assert driven.manager.stats()["blocks_free"] == made.capacity.usable
    driven.run(longest, most, random.Random(seed))
    driven.manager.check_integrity()


@settings(max_examples=35)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 1), placements, st.integers(1, 60))
def test_the_longest_is_admitted_and_one_block_more_is_not(
    heads: list[int], states: int, placement: str, units: int
) -> None:
    made = with_units(caches_of([(Full(), h) for h in heads], states), Limits(5000, 16), placement, units)
    longest = made.capacity.longest()
    assume(longest)
    assert longest % BLOCK == 0
    driven = Driven(made.configs[0])
    driven.run(longest, 16, random.Random(0))
    more = Driven(made.configs[0])
    with pytest.raises(OutOfBlocksError):
        more.run(longest + 1, 16, random.Random(0))


@settings(max_examples=35)
@given(unlike, st.integers(0, 2), placements, st.integers(5, 200), st.integers(1, 60), st.integers(0, 99))
def test_as_many_at_once_as_was_promised(
    kinds: list[tuple[Retention, int]], states: int, placement: str, units: int, length: int, seed: int
) -> None:
    """All of them grow side by side, each step shared out at random."""
    limits = Limits(length, 24, 64)
    made = with_units(caches_of(kinds, states), limits, placement, units)
    count = min(made.capacity.simultaneous(length), limits.max_num_seqs, 40)
    assume(count)
    driven, rng = Driven(made.configs[0]), random.Random(seed)
    left = {driven.begin(length): length for _ in range(count)}
    while any(left.values()):
        budget, step = limits.max_num_batched_tokens, driven.manager.begin_step()
        for row in rng.sample(sorted(left), len(left)):
            chunk = min(left[row], budget, rng.randint(0, limits.max_num_batched_tokens))
            if chunk:
                assert step.try_add(row, chunk) == 0
                left[row], budget = left[row] - chunk, budget - chunk
        given_out = driven.manager.allocate(step)
        driven.manager.commit(given_out.step)
        driven.manager.retire(given_out.step)
    driven.manager.check_integrity()


@settings(max_examples=40)
@given(unlike, st.integers(0, 2), placements, st.integers(1, 24))
def test_every_block_is_handed_out_and_lies_in_the_arena(
    kinds: list[tuple[Retention, int]], states: int, placement: str, units: int
) -> None:
    caches = caches_of([(Full(), 2), *kinds], states)
    config = with_units(caches, Limits(1000, BLOCK), placement, units).configs[0]
    driven, full = Driven(config), False
    while not full:  # one request after another, until none can be begun
        row = driven.begin(BLOCK)
        try:
            driven.grow(row, BLOCK)
        except OutOfBlocksError:
            full = True
    assert driven.manager.stats()["blocks_free"] < len(config.kv_cache_groups)
    for group in config.kv_cache_groups:
        ids = {block for r in range(row) for block in driven.manager.table(r, group.index)[1]}
        for block in ids:
            assert max(1, group.blocks_per_large_page) <= block < group.num_blocks
            for cache in group.cache_ids:
                assert config.footprint(cache, block)[-1][1] <= config.total_bytes


def test_pipeline_ranks_of_gemma_3_27b_agree_on_ids() -> None:
    """62 layers, every sixth full, over stages of 16, 16, 15 and 15: one table serves every rank."""
    content = KVHeads(16, 128, dtype="bfloat16")
    caches = {CacheId(i): KVCacheSpec(content, Full() if i % 6 == 5 else Window(1024)) for i in range(62)}
    bounds = (0, 16, 32, 47, 62)
    ranks = RankLayout([range(a, b) for a, b in pairwise(bounds)])
    for placement in ("slots", "packed"):
        made = plan(caches, {}, Budget(memory=8 << 30), Limits(8192), placement=placement, block_size=16, ranks=ranks)
        assert sorted(c for config in made.configs for g in config.kv_cache_groups for c in g.cache_ids) == list(caches)
        tables = []
        for config in made.configs:
            assert config.total_bytes <= 8 << 30
            driven, rng = Driven(config), random.Random(5)
            rows = [driven.begin(rng.randint(1, 4000)) for _ in range(6)]
            for _ in range(40):
                row = rng.choice(rows)
                left = int(driven.manager.requests.known[row]) - int(driven.manager.requests.computed[row])
                if left:
                    driven.grow(row, min(left, rng.randint(1, 600)))
            mine = [driven.manager.table(row, g) for row in rows for g in range(len(config.kv_cache_groups))]
            for row in rows:
                for group in config.kv_cache_groups:
                    for block in driven.manager.table(row, group.index)[1]:
                        for cache in group.cache_ids:
                            assert config.footprint(cache, block)[-1][1] <= config.total_bytes
            tables.append(mine)
        assert tables[0] == tables[1] == tables[2] == tables[3]
        assert sum(len(ids) for _, ids in tables[0]) > 500
        assert len({Capacity(c, made.limits).usable for c in made.configs}) == 1
