"""The manager against a slow one that is right by reading, operation by operation: same ids, same order, same hits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.named_manager import NamedManager, ScheduledRequest
from support.perfect_model import SHAPES, PerfectManager

SIZES = (1, 2, 3, 4, 6)


class Pair:
    """The manager and the model, given the same operations."""

    def __init__(self, config_of, rng: random.Random) -> None:
        self.rng = rng
        groups = [(rng.choice(SHAPES), rng.choice(SIZES)) for _ in range(rng.randint(1, 5))]
        blocks = rng.choice((8, 20, 60)) + 1
        caching = rng.random() < 0.95
        self.groups = groups
        partial = rng.random() < 0.5
        self.real = NamedManager(config_of(groups, blocks), prefix_caching=caching, partial_reuse=partial)
        self.model = PerfectManager(groups, blocks, caching=caching, partial=partial)
        self.in_flight: list[int] = []
        self.names = 0
        self.seen = {"hit": 0, "copy": 0, "evict": 0, "refused": 0, "reset": 0, "part": 0}

    def begin(self) -> None:
        rng = self.rng
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        if self.model.live and rng.random() < 0.6:
            other = rng.choice(list(self.model.live.values())).tokens
            tokens = other[: rng.randint(1, len(other))] + tokens[: rng.randint(0, 6)]
        name, self.names = f"r{self.names}", self.names + 1
        salt = rng.choice(("", "", "tenant"))
        self.real.begin(name, tokens, salt=salt)
        self.model.begin(name, tokens, salt)

    def ask(self) -> None:
        rng = self.rng
        if len(self.in_flight) == 2:
            return
        asks = []
        for name in rng.sample(list(self.model.live), len(self.model.live)):
            request = self.model.live[name]
            start = request.computed if request.ids else self.model.hit(request)
            if not request.ids:
                assert self.real.lookup([name]) == [start]
            limit = max(len(request.tokens) - start, 1)  # or the token that a step in flight will sample
            if rng.random() < 0.7:
                asks.append((name, rng.randint(1, min(limit, rng.choice((1, 4, 30))))))
        while (short := self.model.short(asks)) or not asks:
            assert self.real.blocks_short([ScheduledRequest(*a) for a in asks]) == short
            if not asks:
                return
            self.seen["refused"] += 1
            asks.pop()
        given, right = self.real.allocate([ScheduledRequest(*a) for a in asks]), self.model.allocate(asks)
        assert dict(given.cached_tokens) == right.hits
        assert [tuple(b) for b in given.new_blocks] == right.new_blocks
        assert [tuple(c) for c in given.copies] == right.copies
        self.in_flight.append(given.step)
        self.seen["hit"] += any(right.hits.values())
        self.seen["copy"] += bool(right.copies)
        self.seen["part"] += any(hit % size for hit in right.hits.values() for _, size in self.groups)

    def commit(self) -> None:
        if not self.in_flight:
            return
        step = self.in_flight.pop(0)
        sampled = {
            name: [self.rng.randrange(2)]
            for name, request, end in self.model.steps[step]
            if self.model.live.get(name) is request and end == len(request.tokens)
        }
        self.real.commit(step, sampled)
        self.model.commit(step, sampled)
        if self.rng.random() < 0.7:
            self.retire()

    def retire(self) -> None:
        step = self.model.step - len(self.in_flight)
        self.real.retire(step)
        self.model.retire(step)

    def free(self) -> None:
        names = [n for n in self.model.live if self.rng.random() < 0.4]
        self.real.free(names)
        self.model.free(names)

    def fork(self) -> None:
        if not self.model.live or len(self.model.live) > 7:
            return
        parent = self.rng.choice(list(self.model.live))
        if self.model.live[parent].computed > len(self.model.live[parent].tokens):
            return
        children = [f"r{self.names + i}" for i in range(self.rng.randint(1, 2))]
        self.names += len(children)
        self.real.fork(parent, children)
        self.model.fork(parent, children)

    def reset(self) -> None:
        self.real.reset_prefix_cache()
        self.model.reset()
        self.seen["reset"] += 1

    def check(self) -> None:
        found = self.real.stats()
        right = self.model.stats()
        assert {name: found[name] for name in right} == right
        self.seen["evict"] = right["evictions"]
        for name in self.model.live:
            for g in range(len(self.groups)):
                assert self.real.table(name, g) == self.model.table(name, g)

    def run(self, operations: int) -> None:
        kinds = [self.begin, self.ask, self.commit, self.retire, self.free, self.fork, self.reset]
        for _ in range(operations):
            self.rng.choices(kinds, weights=(20, 34, 28, 8, 5, 3, 0.4))[0]()
            self.check()
        self.real.check_integrity()


def soak(config_of, operations: int, each: int = 200) -> None:
    seen: dict[str, int] = {}
    for seed in range(operations // each):
        pair = Pair(config_of, random.Random(seed))
        pair.run(each)
        for what, count in pair.seen.items():
            seen[what] = seen.get(what, 0) + count
    assert all(count > operations // 1000 for count in seen.values()), seen


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_operations(config_of, rng):
    Pair(config_of, rng).run(40)


def test_twenty_thousand_operations(config_of):
    soak(config_of, 20_000)


@pytest.mark.long
def test_a_million_operations(config_of):
    soak(config_of, 1_000_000)
