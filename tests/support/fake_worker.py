"""A worker whose "model" is arithmetic over the cache: it stores token ids in slots and reads them back.

The next token is a hash of exactly the tokens that each group's retention lets the last query see, read
through the block tables. Any wrong block, slot, copy, hit or freed block changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvcore.plan.config import KVCacheConfig
from kvcore.spec.retention import Retention
from kvcore.worker.messages import Entry, SchedulerOutput, StepResult
from kvcore.worker.sanitizer import Sanitizer

VOCABULARY = 50


def next_token(views: Sequence[Sequence[tuple[int, int]]], seed: int) -> int:
    """A token from what each group sees: (position, token) pairs."""
    digest = hashlib.sha256(repr(([list(v) for v in views], seed)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCABULARY


def visible(retention: Retention, last: int) -> range:
    """Positions that the query at `last` sees."""
    return range(retention.first_needed(last), last + 1)


def oracle(retentions: Sequence[Retention], prompt: Sequence[int], count: int, seed: int) -> list[int]:
    """The continuation, with no cache at all."""
    tokens = list(prompt)
    for _ in range(count):
        last = len(tokens) - 1
        tokens.append(next_token([[(p, tokens[p]) for p in visible(r, last)] for r in retentions], seed))
    return tokens[len(prompt) :]


class FakeWorker:
    """Applies deltas, copies blocks, writes and reads slots, as a real worker does with tensors."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.groups = config.kv_cache_groups
        self.sanitizer = Sanitizer(config)
        # One store for all groups: under `slots` a block id is the same bytes whichever group owns it. Under `packed` a
        # large page is, so that a write by another group destroys all of it.
        self.blocks: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
        self.owners: dict[int, int] = {}
        self.tables: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self.entries: dict[int, Entry] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        output = SchedulerOutput.from_bytes(output.to_bytes())
        self.sanitizer.step(output)
        for row in output.left.tolist():
            self.entries.pop(row, None)
        for entry in output.entries:
            self.entries[entry.row] = entry
            for g in range(len(self.groups)):
                self.tables[entry.row, g] = 0, []
        at = 0
        for row, group, drop, keep, count in zip(*(n.tolist() for n in output.deltas[:5]), strict=True):
            first, ids = self.tables[row, group]
            ids = ids[drop:][:keep] + output.deltas.ids[at : at + count].tolist()
            self.tables[row, group] = first + drop, ids
            at += count
        for group, source, target in output.copies.tolist():
            copied = dict(self.blocks[self._place(group, source)])
            self._own(group, target)
            self.blocks[self._place(group, target)] = copied
        parts = list(zip(*(n.tolist() for n in (output.rows, output.counts, output.computed)), strict=True))
        tokens = iter(output.token_ids.tolist())
        for row, count, computed in parts:
            for position in range(computed, computed + count):
                self._write(row, position, next(tokens))
        results: list[int] = []
        for (row, count, computed), draws in zip(parts, output.draws.tolist(), strict=True):
            last = computed + count - 1
            views = [
                [(p, self._read(row, g, p)) for p in visible(group.spec.retention, last)]
                for g, group in enumerate(self.groups)
            ]
            results += [next_token(views, self.entries[row].ask.seed + i) for i in range(draws)]
        return StepResult(output.step, np.array(results, np.int64))

    def _slot(self, row: int, group: int, position: int) -> tuple[int, int]:
        first, ids = self.tables[row, group]
        size = self.groups[group].block_size
        return ids[position // size - first], position % size

    def _place(self, group: int, block: int) -> tuple[int, int]:
        return (group if self.groups[group].blocks_per_large_page else 0), block

    def _own(self, group: int, block: int) -> None:
        cut = self.groups[group].blocks_per_large_page
        if not cut:
            return
        assert block >= cut, "a null block is written"
        owner = self.owners.get(block // cut, group)
        if owner != group:
            old = self.groups[owner].blocks_per_large_page
            for place in range(block // cut * old, (block // cut + 1) * old):
                self.blocks.pop((owner, place), None)
        self.owners[block // cut] = group

    def _write(self, row: int, position: int, token: int) -> None:
        for g, group in enumerate(self.groups):
            first, _ = self.tables[row, g]
            if position // group.block_size >= first:
                block, offset = self._slot(row, g, position)
                self._own(g, block)
                self.blocks.setdefault(self._place(g, block), {})[offset] = (g, position, token)

    def _read(self, row: int, group: int, position: int) -> int:
        block, offset = self._slot(row, group, position)
        owner, stored, token = self.blocks[self._place(group, block)][offset]
        if (owner, stored) != (group, position):
            raise AssertionError(f"slot of group {owner}, token {stored} read as {group}, {position}")
        return token
