"""The manager by names: what tests say of requests "a" and "b", said to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcore.errors import RequestError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.step import Step


class ScheduledRequest(NamedTuple):
    """One request's part of a step."""

    request_id: str
    num_scheduled: int


class TableDelta(NamedTuple):
    """``row = row[drop_front:][:keep] + ids; first_block += drop_front`` in one group."""

    drop_front: int
    keep: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """A `StepAllocation` by names; `deltas` has one entry a group, also where nothing changes."""

    step: int
    deltas: Mapping[str, tuple[TableDelta, ...]]
    copies: tuple[tuple[int, ...], ...]
    new_blocks: tuple[tuple[int, ...], ...]
    cached_tokens: Mapping[str, int]
    dead: tuple[tuple[int, ...], ...]


class NamedStep:
    """A `Step` by names."""

    def __init__(self, step: Step, rows: Mapping[str, int]) -> None:
        self.step, self.rows = step, rows

    @property
    def taken(self) -> int:
        return self.step.taken

    def try_add(self, ask: ScheduledRequest) -> int:
        return self.step.try_add(self.rows.get(ask.request_id, -1), ask.num_scheduled)


class NamedManager:
    """`KVCacheManager` by names; a test that looks inside does so through `real`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.real = KVCacheManager(*args, **options)
        self.rows: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:  # what knows no request: stats, retire, pins, ...
        return getattr(self.real, name)

    def row(self, name: str) -> int:
        return self.rows.get(name, -1)

    def begin(self, name: str, token_ids: Sequence[int], **options: Any) -> None:
        if name in self.rows:
            raise RequestError("this request has begun already", field="request_id", got=name)
        self.rows[name] = self.real.begin(token_ids, name=name, **options)

    def extend(self, name: str, token_ids: Sequence[int]) -> None:
        self.real.extend(self.row(name), token_ids)

    def fork(self, parent: str, children: Sequence[str]) -> None:
        if set(children) & set(self.rows) or len(set(children)) < len(children):
            raise RequestError("a child's name is in use", field="child_ids", got=children)
        self.rows.update(zip(children, self.real.fork(self.row(parent), children), strict=True))

    def lookup(self, names: Sequence[str]) -> list[int]:
        return [self.real.lookup(self.row(name)) for name in names]

    def begin_step(self) -> NamedStep:
        return NamedStep(self.real.begin_step(), self.rows)

    def fill(self, step: Step, asks: Sequence[ScheduledRequest]) -> Step:
        """Runs of requests that are admitted are added by one call, as a scheduler does."""
        r, batch = self.real.requests, list[tuple[int, int]]()
        for ask in (*asks, None):
            row = self.row(ask.request_id) if ask is not None else -1
            if ask is not None and row >= 0 and r.admitted[row]:
                batch.append((row, ask.num_scheduled))
                continue
            if batch:
                step.add(np.array([b[0] for b in batch]), np.array([b[1] for b in batch]))
                batch = []
            if ask is not None:
                r.check(np.array([row]))
                step.enter(row, ask.num_scheduled)
        return step

    def blocks_short(self, asks: Sequence[ScheduledRequest]) -> int:
        prefixes = self.real._prefixes
        return self.fill(Step(self.real.requests, self.real._pool, prefixes.find, prefixes.find_whole), asks).short

    def allocate(self, asks: NamedStep | Sequence[ScheduledRequest]) -> Given:
        step = asks.step if isinstance(asks, NamedStep) else self.fill(self.real.begin_step(), asks)
        given = self.real.allocate(step)
        names = {row: name for name, row in self.rows.items()}
        changes: dict[int, dict[int, TableDelta]] = {row: {} for row in given.rows.tolist()}
        at = 0
        for row, group, drop, keep, count in zip(*(n.tolist() for n in given.deltas[:5]), strict=True):
            ids = tuple(given.deltas.ids[at : at + count].tolist())
            changes.setdefault(row, {})[group] = TableDelta(drop, keep, ids)
            at += count
        assert at == len(given.deltas.ids)
        groups = range(self.real.requests.groups)
        deltas = {
            names[row]: tuple(changed.get(g, TableDelta(0, len(self.real.table(row, g)[1]), ())) for g in groups)
            for row, changed in changes.items()
        }
        return Given(
            given.step,
            deltas,
            tuple(map(tuple, given.copies.tolist())),
            tuple(map(tuple, given.new_blocks.tolist())),
            {names[row]: hit for row, hit in given.cached_tokens.items()},
            tuple(map(tuple, given.dead.tolist())),
        )

    def commit(self, step: int, new_tokens: Mapping[str, Sequence[int]]) -> None:
        """Tokens of requests that were freed since are passed over."""
        alive = {name: tokens for name, tokens in new_tokens.items() if name in self.rows}
        pairs = [(self.row(name), token) for name, tokens in alive.items() for token in tokens]
        self.real.commit(step, np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.int64))

    def free(self, names: Sequence[str], **options: Any) -> None:
        self.real.free([self.row(name) for name in names], **options)
        for name in names:
            self.rows.pop(name, None)

    def table(self, name: str, group: int) -> tuple[int, list[int]]:
        return self.real.table(self.row(name), group)

    def num_computed(self, name: str) -> int:
        return int(self.real.requests.computed[self.row(name)])


def run(manager: NamedManager, *asks: tuple[str, int], **sampled: int) -> Given:
    """One step from allocate to retire."""
    given = manager.allocate([ScheduledRequest(*a) for a in asks])
    manager.commit(given.step, {name: [token] for name, token in sampled.items()})
    manager.retire(given.step)
    return given
