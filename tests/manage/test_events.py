"""A router that hears events and nothing else knows what the manager's index knows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvcore.errors import ConfigError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.prefix.block_hash import Adapter
from kvcore.manage.watch.events import Cleared, Event, Removed, Stored
from kvcore.spec.retention import Chunk, Full, Window

LONG, SHORT, EVERY = 100_000, 10_000, 1_000


@dataclass
class Router:
    """Which digests can be hit, by tier, group and digest."""

    index: dict[tuple[str, int, bytes], int] = field(default_factory=dict)
    parents: dict[tuple[int, bytes], bytes | None] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)

    def hear(self, event: Event) -> None:
        self.seen[type(event).__name__] = self.seen.get(type(event).__name__, 0) + 1
        if isinstance(event, Stored):
            key = event.tier, event.group, event.digest
            assert key not in self.index
            self.index[key] = event.block
            assert self.parents.setdefault((event.group, event.digest), event.parent) == event.parent
        elif isinstance(event, Removed):
            assert self.index.pop((event.tier, event.group, event.digest)) == event.block
        else:
            self.index = {key: block for key, block in self.index.items() if key[0] != event.tier}


class Load:
    """Random requests, some of them alike, with two steps in flight."""

    def __init__(self, manager: KVCacheManager, rng: random.Random) -> None:
        self.manager, self.rng = manager, rng
        self.rows: list[int] = []
        self.flying: list[int] = []

    def operate(self) -> None:
        getattr(
            self, self.rng.choices(("begin", "step", "commit", "free", "fork", "reset"), (30, 30, 30, 25, 3, 0.05))[0]
        )()

    def begin(self) -> None:
        if len(self.rows) < 12:
            text = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 30))]
            extras = self.rng.choice([(), (), (Adapter(b"x"),)])
            self.rows.append(self.manager.begin(text, salt=self.rng.choice(["", "s"]), extras=extras))

    def step(self) -> None:
        if len(self.flying) == 2:
            self.commit()
        manager, step = self.manager, self.manager.begin_step()
        rows = self.rng.sample(self.rows, min(len(self.rows), 3))
        known = manager.requests
        for row in rows:
            done = known.computed[row] if known.admitted[row] else manager.lookup(row)
            if known.known[row] > done:
                step.try_add(row, self.rng.randint(1, int(known.known[row] - done)))
        if len(step.whole().rows) and not step.short:
            self.flying.append(manager.allocate(step).step)

    def commit(self) -> None:
        if self.flying:
            number = self.flying.pop(0)
            self.manager.commit(number)
            self.manager.retire(number)

    def fork(self) -> None:
        r = self.manager.requests
        able = [row for row in self.rows if r.computed[row] <= r.known[row]]
        if able:
            self.rows += self.manager.fork(self.rng.choice(able), [""])

    def free(self) -> None:
        if self.rows:
            row = self.rows.pop(self.rng.randrange(len(self.rows)))
            self.manager.free(np.array([row]), forget=self.rng.random() < 0.02)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()


@pytest.mark.parametrize("operations", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "groups", [[(Full(), 4)], [(Full(), 4), (Window(6), 2), (Chunk(8), 4)]], ids=["full", "full, window, chunk"]
)
def test_a_router_fed_by_events_alone_has_the_managers_index(config_of, groups, operations) -> None:
    manager = KVCacheManager(config_of(groups, 24 * len(groups)), events=True)
    router, load = Router(), Load(manager, random.Random(5))
    for i in range(1, operations + 1):
        load.operate()
        if i % EVERY == 0:
            for event in manager.take_events():
                router.hear(event)
            entries = {("device", g, digest): block for g, digest, block in manager._prefixes.cache.entries()}
            assert router.index == entries
            manager.check_integrity()
    assert router.seen["Stored"] > operations // 10
    assert router.seen["Removed"] > operations // 20
    assert router.seen["Cleared"] > 1
    assert manager.stats()["evictions"] > operations // 20


def test_what_a_stored_event_tells(config_of) -> None:
    """Two blocks: digests, parents, the tokens of each, and the conditions that the digests stand for."""
    manager = KVCacheManager(config_of([(Full(), 4)], 10), events=True)
    row = manager.begin(list(range(100, 109)), salt="s", extras=[Adapter(b"y"), Adapter(b"x")])
    step = manager.begin_step()
    step.enter(row, 9)
    manager.commit(manager.allocate(step).step)
    one, two = manager.take_events()
    digests, blocks = manager.requests.chain(row).digests, manager.table(row, 0)[1]
    assert one == Stored(0, digests[0], blocks[0], None, (100, 101, 102, 103), "s", (b"x", b"y"), "device")
    assert two == Stored(0, digests[1], blocks[1], digests[0], (104, 105, 106, 107), "s", (b"x", b"y"), "device")
    manager.reset_prefix_cache()
    assert manager.take_events() == [Cleared("device")]
    assert manager.take_events() == []


def test_events_are_collected_only_where_somebody_asked(config_of) -> None:
    manager = KVCacheManager(config_of([(Full(), 4)], 10))
    with pytest.raises(ConfigError, match="events=True"):
        manager.take_events()
