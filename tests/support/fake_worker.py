"""A worker whose "model" is arithmetic over the cache: it stores token ids in slots and reads them back.

The next token is a hash of exactly the tokens that each group's retention lets the last query see, read
through the block tables. Any wrong block, slot, copy, hit or freed block changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcore.plan.config import KVCacheConfig
from kvcore.spec.retention import Retention
from kvcore.worker.messages import SchedulerOutput, StepResult

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
        # One store for all groups: under `slots` a block id is the same bytes whichever group owns it.
        self.blocks: dict[int, dict[int, tuple[int, int, int]]] = {}
        self.rows: dict[tuple[str, int], tuple[int, list[int]]] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        output = SchedulerOutput.from_bytes(output.to_bytes())
        for request_id in output.finished:
            for g in range(len(self.groups)):
                self.rows.pop((request_id, g), None)
        for row in output.rows:
            for g, delta in enumerate(row.deltas):
                first, ids = self.rows.get((row.request_id, g), (0, []))
                ids = ids[delta.drop_front :][: delta.keep] + list(delta.ids)
                self.rows[row.request_id, g] = (first + delta.drop_front, ids)
        for _, source, target in output.copies:
            self.blocks[target] = dict(self.blocks[source])
        for row in output.rows:
            for i, token in enumerate(row.token_ids):
                self._write(row.request_id, row.num_computed + i, token)
        results = []
        for row in output.rows:
            last = row.num_computed + len(row.token_ids) - 1
            views = [
                [(p, self._read(row.request_id, g, p)) for p in visible(group.spec.retention, last)]
                for g, group in enumerate(self.groups)
            ]
            results.append(tuple(next_token(views, ask.seed) for ask in row.samples))
        return StepResult(output.step, tuple(results))

    def _slot(self, request_id: str, group: int, position: int) -> tuple[int, int]:
        first, ids = self.rows[request_id, group]
        size = self.groups[group].block_size
        return ids[position // size - first], position % size

    def _write(self, request_id: str, position: int, token: int) -> None:
        for g, group in enumerate(self.groups):
            first, _ = self.rows[request_id, g]
            if position // group.block_size >= first:
                block, offset = self._slot(request_id, g, position)
                self.blocks.setdefault(block, {})[offset] = (g, position, token)

    def _read(self, request_id: str, group: int, position: int) -> int:
        block, offset = self._slot(request_id, group, position)
        owner, stored, token = self.blocks[block][offset]
        if (owner, stored) != (group, position):
            raise AssertionError(f"slot of group {owner}, token {stored} read as {group}, {position}")
        return token
