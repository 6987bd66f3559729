"""The manager of large pages: ids of each group's own, hits as under `slots`, states, dead content by its group."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.named_manager import NamedManager, ScheduledRequest

from kvcore.manage.watch.events import Stored
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, State
from kvcore.spec.retention import Full, Latest, Retention, Window


def config(*kinds: tuple[Retention, int], pages: int = 40, states: int = 0) -> KVCacheConfig:
    """Groups of so many KV heads, and layers with a state."""
    specs = [KVCacheSpec(KVHeads(heads, 8), retention) for retention, heads in kinds]
    specs += [KVCacheSpec(State(("s",), ((100,),), ("float32",)), Latest())] * states
    caches = {CacheId(i): s for i, s in enumerate(specs)}
    made = {"limits": Limits(1 << 20), "placement": "packed", "block_size": 4}
    large = plan(caches, {}, Budget(memory=1), **made).configs[0].large_page_bytes
    return plan(caches, {}, Budget(memory=pages * large), **made).configs[0]


def test_ids_are_of_each_group_and_never_null() -> None:
    shape = config((Full(), 1), (Window(9), 3))
    manager = NamedManager(shape)
    manager.begin("a", range(40))
    given = manager.allocate([ScheduledRequest("a", 40)])
    cuts = [g.blocks_per_large_page for g in shape.kv_cache_groups]
    assert len(set(cuts)) == 2
    for group, block in given.new_blocks:
        assert cuts[group] <= block < shape.kv_cache_groups[group].num_blocks
    for group in (0, 1):
        _, ids = manager.table("a", group)
        assert ids == list(given.deltas["a"][group].ids)
        pages = [block // cuts[group] for block in ids]
        assert pages == sorted(pages)
    # No large page serves two groups.
    owners = {(block // cuts[group], group) for group, block in given.new_blocks}
    assert len({page for page, _ in owners}) == len(owners)
    manager.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_hits_are_those_of_slots_while_nothing_is_evicted(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [(Full(), 1), (Window(9), 3)][: rng.randint(1, 2)]
    caches = {CacheId(i): KVCacheSpec(KVHeads(h, 8), r) for i, (r, h) in enumerate(kinds)}
    slots = plan(caches, {}, Budget(num_blocks=4000), Limits(1 << 20), placement="slots", block_size=4).configs[0]
    managers = [NamedManager(config(*kinds, pages=900)), NamedManager(slots)]
    for i in range(40):
        prompt = [rng.randrange(2)] * rng.randint(1, 30) + [rng.randrange(3)] * 5
        seen = []
        for manager in managers:
            manager.begin(f"r{i}", prompt)
            hit = manager.lookup([f"r{i}"])[0]
            given = manager.allocate([ScheduledRequest(f"r{i}", len(prompt) - hit)])
            manager.commit(given.step, {f"r{i}": [7]})
            manager.retire(given.step)
            seen.append((hit, given.cached_tokens, [len(manager.table(f"r{i}", g)[1]) for g in range(len(kinds))]))
            manager.check_integrity()
        assert seen[0] == seen[1]
        if rng.random() < 0.7:
            for manager in managers:
                manager.free([f"r{i}"])


def test_a_state_is_one_block_from_the_first_step_to_the_last() -> None:
    manager = NamedManager(config((Full(), 1), pages=60, states=2))
    manager.begin("a", range(30))
    seen = set()
    for chunk in (10, 10, 10):
        given = manager.allocate([ScheduledRequest("a", chunk)])
        manager.commit(given.step, {"a": [1]} if chunk == 10 and manager.num_computed("a") == 30 else {})
        manager.retire(given.step)
        seen.add(tuple(manager.table("a", 1)[1]))
    assert len(seen) == 1
    assert len(next(iter(seen))) == 1
    # Nobody can go on from the middle of another's tokens: its state there is gone.
    manager.begin("b", range(30))
    assert manager.lookup(["b"]) == [0]
    manager.free(["a"])
    manager.check_integrity()
    assert manager.stats()["blocks_used"] == 0


def test_dead_content_and_events_name_ids_of_the_group() -> None:
    shape = config((Full(), 1), (Window(5), 3), pages=30)
    manager = NamedManager(shape, track_dead=True, events=True)
    manager.begin("a", range(24))
    given = manager.allocate([ScheduledRequest("a", 24)])
    manager.commit(given.step, {"a": [1]})
    manager.retire(given.step)
    stored = {(e.group, e.block) for e in manager.take_events() if isinstance(e, Stored)}
    assert stored <= {(g, b) for g, b in given.new_blocks}
    manager.free(["a"], forget=True)
    manager.begin("b", [9])
    dead = manager.allocate([ScheduledRequest("b", 1)]).dead
    assert sorted(dead) == sorted(given.new_blocks)


def test_ranks_of_one_plan_agree_on_ids() -> None:
    """The same calls give the same ids, whatever a large page weighs on the rank."""
    shape = config((Full(), 1), (Window(9), 3))
    tables = []
    for _ in range(2):
        manager, rng = NamedManager(shape), random.Random(3)
        for i in range(12):
            manager.begin(f"r{i}", [rng.randrange(5) for _ in range(rng.randint(1, 40))])
            need = int(manager.real.requests.known[manager.row(f"r{i}")]) - manager.lookup([f"r{i}"])[0]
            given = manager.allocate([ScheduledRequest(f"r{i}", need)])
            manager.commit(given.step, {f"r{i}": [1]})
            manager.retire(given.step)
            if i % 3 == 2:
                manager.free([f"r{i - 1}"])
        tables.append([manager.table(f"r{i}", g) for i in (0, 2, 9, 11) for g in (0, 1)])
    assert tables[0] == tables[1]
    assert np.concatenate([ids for _, ids in tables[0]]).size


def test_every_token_has_a_reason_and_evictions_a_name() -> None:
    """Large pages that go to another group take blocks of others with them; no prompt is explained in part."""
    rng = random.Random(11)
    shape = config((Window(9), 3), (Full(), 1), pages=12)
    manager, alive, reasons = NamedManager(shape, explain=True), [], set()
    for i in range(300):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        name = f"r{i}"
        manager.begin(name, prompt)
        (hit,) = manager.lookup([name])
        step = manager.allocate([ScheduledRequest(name, len(prompt) - hit)])
        manager.commit(step.step, {name: [0]})
        manager.retire(step.step)
        told = manager.explain(manager.row(name))
        assert (told.hit_tokens, told.prompt_tokens) == (hit, len(prompt))
        assert sum(m.tokens for m in told.missed) == len(prompt) - hit
        reasons |= {m.reason for m in told.missed}
        assert all(m.request for m in told.missed if m.reason == "evicted")
        alive.append(name)
        while len(alive) > rng.randrange(1, 3):
            manager.free([alive.pop(0)])
    assert {"evicted", "token", "window", "granularity"} <= reasons


def test_a_model_with_states_reuses_nothing_and_says_so() -> None:
    manager = NamedManager(config((Full(), 1), pages=40, states=1), explain=True)
    for name in "ab":
        manager.begin(name, range(20))
        step = manager.allocate([ScheduledRequest(name, 20)])
        manager.commit(step.step, {name: [0]})
    assert manager.explain(manager.row("b")).by_reason() == {"disabled": 20}
