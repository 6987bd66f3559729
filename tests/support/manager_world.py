"""A manager beside a model that is obviously right: it keeps what every slot of every block holds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from kvcore.errors import OutOfBlocksError, RequestError
from kvcore.spec.retention import Chunk, Full, Window
from support.named_manager import Given, NamedManager, NamedStep, ScheduledRequest

RETENTIONS = (Full(), Window(1), Window(2), Window(5), Window(8), Chunk(1), Chunk(4), Chunk(6), Chunk(8))
SALTS = ("", "tenant")
ALPHABET = 2
STEPS_IN_FLIGHT = 2


def content(before: int, token: int) -> int:
    """What a layer stores for a token depends on it and on everything before it."""
    return hash((before, token))


Block = tuple[int, int]  # group, or 0 where all groups share one numbering, and id


@dataclass
class Person:
    """A request of the model. `truth` runs ahead of `known` by tokens that steps in flight will sample."""

    salt: str
    known: int
    truth: list[int]
    contents: list[int] = field(default_factory=list)
    computed: int = 0
    admitted: bool = False
    rows: list[tuple[int, list[int]]] = field(default_factory=list)  # as the worker has them
    view: list[tuple[int, list[int]]] = field(default_factory=list)  # the same, a fork's from its birth

    def token(self, i: int, rng: random.Random) -> int:
        while len(self.truth) <= i:
            self.truth.append(rng.randrange(ALPHABET))
        return self.truth[i]

    def value(self, i: int, rng: random.Random) -> int:
        while len(self.contents) <= i:
            before = self.contents[-1] if self.contents else hash(self.salt)
            self.contents.append(content(before, self.token(len(self.contents), rng)))
        return self.contents[i]


class World:
    """One manager, the model beside it, and what a scheduler may do to both.

    A block is told by (group, id) under `packed`, where each group numbers its own, and by its id alone under `slots`.
    """

    def __init__(self, config_of, rng: random.Random) -> None:
        count = rng.randint(1, 4)
        self.groups = [(rng.choice(RETENTIONS), rng.choice((1, 2, 3, 4, 6))) for _ in range(count)]
        self.total = rng.choice((8, 15, 30, 60))
        self.caching = rng.random() < 0.9
        config = config_of(self.groups, self.total + 1)
        self.cuts = [g.blocks_per_large_page for g in config.kv_cache_groups]  # 0 under `slots`
        self.partial = rng.random() < 0.4
        options = {"prefix_caching": self.caching, "partial_reuse": self.partial}
        self.manager = NamedManager(config, **options, explain=True, explain_history=4)
        self.people: dict[str, Person] = {}
        self.preempted: list[tuple[str, Person]] = []
        self.names = 0
        self.slots: dict[tuple[Block, int], tuple[int, int]] = {}  # (block, offset) -> (content, step)
        self.last_reader: dict[Block, int] = {}
        self.in_flight: dict[int, list[tuple[str, Person, int]]] = {}
        self.step = self.committed = self.retired = 0
        self.seen = {"hit": 0, "copy": 0, "evict": 0, "refused": 0, "two in flight": 0, "revived": 0}

    def block(self, group: int, number: int) -> Block:
        return (group if self.cuts[group] else 0), number

    def sharing(self, group: int, number: int) -> set[Block]:
        """The blocks that lose what they hold with this one: under `packed` those of other groups in its page."""
        if not (cut := self.cuts[group]):
            return {(0, number)}
        page, mine = number // cut, {(group, number)}
        for other, count in enumerate(self.cuts):
            if other != group:
                mine |= {(other, b) for b in range(page * count, (page + 1) * count)}
        return mine

    # ---- what happens

    def begin(self, rng: random.Random) -> None:
        if self.preempted and rng.random() < 0.5:
            name, person = self.preempted.pop(rng.randrange(len(self.preempted)))
            if name in self.people:
                return
            truth = person.truth[: person.known]
        else:
            name, self.names = f"r{self.names}", self.names + 1
            truth = [rng.randrange(ALPHABET) for _ in range(rng.randint(1, 24))]
            if self.people and rng.random() < 0.6:
                other = rng.choice(list(self.people.values()))
                truth = other.truth[: rng.randint(1, other.known)] + truth[: rng.randint(0, 4)]
        person = Person(rng.choice(SALTS) if rng.random() < 0.2 else "", len(truth), truth)
        self.manager.begin(name, truth, salt=person.salt)
        self.people[name] = person

    def ask(self, rng: random.Random) -> None:
        """A step of some requests; `allocate` and the checks of what it gave."""
        if len(self.in_flight) >= STEPS_IN_FLIGHT:
            return
        names = [n for n in self.people if rng.random() < 0.7]
        rng.shuffle(names)
        hits = dict(zip(names, self.hits(names), strict=True))
        asks = []
        for name in names:
            person = self.people[name]
            start = person.computed if person.admitted else hits[name]
            limit = person.known - start if start < person.known else 1
            asks.append(ScheduledRequest(name, rng.randint(1, min(limit, rng.choice((1, 4, 24))))))
        before = self.snapshot()
        short = self.manager.blocks_short(asks)
        assert self.snapshot() == before
        if short:
            self.seen["refused"] += 1
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(asks)
            assert self.snapshot() == before, "a refused step changed something"
            names, asks = names[:1], asks[:1]
            if self.manager.blocks_short(asks):
                return
        pending = self.manager.stats()["blocks_pending"]
        given = self.manager.allocate(self.grown(asks, rng) if rng.random() < 0.5 else asks)
        self.seen["revived"] += self.manager.stats()["blocks_pending"] < pending
        self.step += 1
        assert given.step == self.step
        assert dict(given.cached_tokens) == {n: hits[n] for n in names if not self.people[n].admitted}
        self.hand_out(given)
        self.run_step(asks, given, rng)

    def grown(self, asks: list[ScheduledRequest], rng: random.Random) -> NamedStep:
        """The same step, one request at a time; a request that finds no blocks leaves it as it was."""
        step = self.manager.begin_step()
        for i, ask in enumerate(asks):
            if rng.random() < 0.3 and (person := self.people[ask.request_id]).admitted:
                with pytest.raises(RequestError):
                    step.try_add(ScheduledRequest(ask.request_id, person.known + 100))
            assert step.try_add(ask) == 0
            assert step.step.short == 0
            with pytest.raises(RequestError):
                step.try_add(asks[rng.randint(0, i)])
        return step

    def hits(self, names: list[str]) -> list[int]:
        new = [n for n in names if not self.people[n].admitted]
        found = dict(zip(new, self.manager.lookup(new), strict=True))
        return [found.get(n, 0) for n in names]

    def hand_out(self, given: Given) -> None:
        held = self.still_needed()
        fresh = [self.block(*new) for new in given.new_blocks]
        assert len(set(fresh)) == len(fresh)
        lost: set[Block] = set()
        for group, number in given.new_blocks:
            cut = self.cuts[group] or 1
            assert cut <= number < cut * (self.total + 1)
            for block in self.sharing(group, number):
                assert block not in held, "a block in use was handed out"
                assert self.last_reader.get(block, 0) <= self.retired, "handed out before its step retired"
                lost.add(block)
        # The copies read their sources before any fresh block may lose what it held.
        moved = {}
        for group, source, target in given.copies:
            assert (group, target) in given.new_blocks
            old, new = self.block(group, source), self.block(group, target)
            moved[new] = {o: self.slots[old, o] for o in range(64) if (old, o) in self.slots}
            self.last_reader[old] = self.step
        for block in lost:
            for offset in range(64):
                self.slots.pop((block, offset), None)
        for target, slots in moved.items():
            self.slots.update({(target, o): v for o, v in slots.items()})
        self.seen["copy"] += len(given.copies)
        self.seen["two in flight"] += len(self.in_flight) > 0

    def still_needed(self) -> set[Block]:
        """Blocks with tokens that a live request will read in its next step."""
        return {
            self.block(g, ids[j // size - first])
            for person in self.people.values()
            for g, ((retention, size), (first, ids)) in enumerate(zip(self.groups, person.view, strict=False))
            for j in range(retention.first_needed(person.computed), person.computed)
        }

    def run_step(self, asks: list[ScheduledRequest], given: Given, rng: random.Random) -> None:
        members = []
        for name, deltas in given.deltas.items():  # of who is in the step, and of others that gave up blocks
            person = self.people[name]
            rows, person.rows = person.rows or [(0, []) for _ in self.groups], []
            for g, delta in enumerate(deltas):
                first, ids = rows[g]
                person.rows.append((first + delta.drop_front, ids[delta.drop_front :][: delta.keep] + list(delta.ids)))
        for name, person in self.people.items():
            for g, row in enumerate(person.rows):
                assert row == self.manager.table(name, g)
        for ask in asks:
            name, person = ask.request_id, self.people[ask.request_id]
            hit = given.cached_tokens.get(name, 0)
            start = person.computed if person.admitted else hit
            end = start + ask.num_scheduled
            self.seen["hit"] += hit > 0
            self.check_hit(person, hit, rng)
            for g, (retention, size) in enumerate(self.groups):
                first, ids = person.rows[g]
                assert len(ids) <= retention.blocks_for_step(end, ask.num_scheduled, size)
                for i in range(start, end):
                    self.slots[self.block(g, ids[i // size - first]), i % size] = (person.value(i, rng), self.step)
                self.last_reader.update(dict.fromkeys([self.block(g, b) for b in ids], self.step))
            person.admitted, person.computed = True, end
            members.append((name, person, end))
            person.view = person.rows
        # Only now: all writes of the step are done, and each request must still find its own.
        for name, person, end in members:
            start = end - next(a.num_scheduled for a in asks if a.request_id == name)
            for g, (retention, size) in enumerate(self.groups):
                first, ids = person.rows[g]
                for j in range(retention.first_needed(start), end):
                    value, _ = self.slots[self.block(g, ids[j // size - first]), j % size]
                    assert value == person.value(j, rng), f"{name} reads what is not its own at token {j}"
        self.in_flight[self.step] = members

    def check_hit(self, person: Person, hit: int, rng: random.Random) -> None:
        for g, (retention, size) in enumerate(self.groups):
            assert self.partial or hit % size == 0
            first, ids = person.rows[g]
            for j in range(retention.first_needed(hit) if hit else 0, hit):
                value, step = self.slots[self.block(g, ids[j // size - first]), j % size]
                assert value == person.value(j, rng), "a hit on the content of other tokens"
                assert step <= self.committed, "a hit on what was not committed"

    def commit(self, rng: random.Random) -> None:
        if not self.in_flight:
            return
        step = next(iter(self.in_flight))
        members = self.in_flight.pop(step)
        sampled = {}
        for name, person, end in members:
            if self.people.get(name) is person and end == person.known:
                sampled[name] = [person.token(end, rng)]
                person.known += 1
        self.manager.commit(step, sampled)
        self.committed = step
        for name, person in self.people.items():
            busy = any(p is person for m in self.in_flight.values() for _, p, _ in m)
            if person.admitted and not busy:
                for g, (retention, size) in enumerate(self.groups):
                    held = len(self.manager.table(name, g)[1])
                    assert held <= retention.resident_blocks(person.computed, size)

    def retire(self, rng: random.Random) -> None:
        step = rng.randint(self.retired, self.step) if rng.random() < 0.3 else self.committed
        self.manager.retire(step)
        self.retired = max(self.retired, step)

    def free(self, rng: random.Random) -> None:
        """Finish, abort or preempt, whatever is in flight."""
        names = [n for n in self.people if rng.random() < 0.3]
        self.manager.free(names)
        for name in names:
            person = self.people.pop(name)
            if rng.random() < 0.5:
                self.preempted.append((name, person))

    def extend(self, rng: random.Random) -> None:
        """Tokens that nobody sampled: a next turn, or the next piece of a prompt."""
        if not self.people:
            return
        name = rng.choice(list(self.people))
        person = self.people[name]
        more = [rng.randrange(ALPHABET) for _ in range(rng.randint(0, 5))]
        if any(p is person for members in self.in_flight.values() for _, p, _ in members):
            with pytest.raises(RequestError):
                self.manager.extend(name, more)
            return
        self.manager.extend(name, more)
        person.truth = person.truth[: person.known] + more
        person.known += len(more)

    def fork(self, rng: random.Random) -> None:
        if not self.people or len(self.people) > 6:
            return
        name = rng.choice(list(self.people))
        parent = self.people[name]
        children = [f"r{self.names + i}" for i in range(rng.randint(1, 2))]
        if parent.computed > parent.known:
            with pytest.raises(RequestError):
                self.manager.fork(name, children)
            return
        self.names += len(children)
        self.manager.fork(name, children)
        for child in children:
            twin = Person(parent.salt, parent.known, parent.truth[: parent.known])
            twin.contents = parent.contents[: parent.known]
            twin.computed, twin.admitted = parent.computed, parent.admitted
            twin.view = parent.view
            self.people[child] = twin
            for members in self.in_flight.values():
                members.extend([(child, twin, end) for _, p, end in members if p is parent])

    def reset(self, rng: random.Random) -> None:
        self.manager.reset_prefix_cache()
        waiting = [n for n, p in self.people.items() if not p.admitted]
        # Where a chunk ends in every group, the next token reads nothing, and nothing has to be cached.
        unit = 1 if self.partial else math.lcm(*(size for _, size in self.groups))
        free = [
            max(
                n
                for n in range(0, self.people[name].known if self.caching else 1, unit)
                if all(retention.first_needed(n) >= n for retention, _ in self.groups)
            )
            for name in waiting
        ]
        assert self.manager.lookup(waiting) == free

    # ---- what must hold

    def snapshot(self) -> object:
        tables = [self.manager.table(n, g) for n in self.people for g in range(len(self.groups))]
        return tables, self.manager.stats(), [self.manager.num_computed(n) for n in self.people]

    def check(self) -> None:
        self.manager.check_integrity()
        owner: dict[int, int] = {}
        for name, person in self.people.items():
            assert self.manager.num_computed(name) == person.computed
            for g in range(len(self.groups)):
                for block in self.manager.table(name, g)[1]:
                    cut = self.cuts[g] or 1
                    assert block >= cut
                    assert owner.setdefault(block // cut, g) == g, "a block, or large page, in two groups"
        stats = self.manager.stats()
        # A large page with pending blocks is in use.
        pending = 0 if any(self.cuts) else stats["blocks_pending"]
        assert stats["blocks_used"] + pending + stats["blocks_free"] == self.total
        assert stats["blocks_used"] >= len(owner)
        self.seen["evict"] = stats["evictions"]

    def finish(self) -> None:
        self.manager.free(list(self.people))
        self.manager.retire(self.step)
        self.manager.check_integrity()
        assert self.manager.stats()["blocks_free"] == self.total, "blocks leaked"
