"""`Sanitizer`: a shadow of all blocks and tables, made from the messages alone, that each step must agree with."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.ragged import Ints, Ragged, spans
from kvcore.plan.config import KVCacheConfig
from kvcore.worker.messages import SchedulerOutput

_NEVER = 0  # steps count from 1
_NOBODY = -1


class Sanitizer:
    """What a worker may do in a step, kept apart from everything that does it.

    A block is free (no table names it), owned (one does) or shared (several do); of its slots so many are written, from
    the front, because a sequence is computed in order. So a step is right when

    - a block that is handed out, or was freed, is named by no table, nor is what another group has in its large page;
    - a block that is written is named by one table, and written from where it was written to;
    - a request that enters finds its hit written to the last slot; what it wrote itself stays written, because
      nobody else may.

    That is a few array operations a step, and nothing that grows with the length of sequences or of the pool.

    Args:
        config: The plan of the rank.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self._groups = config.kv_cache_groups
        self._count = len(self._groups)
        self._sizes = [g.block_size for g in self._groups]
        # Under `packed` each group counts its own ids: here all have one number, those of a group from `_base` on.
        packed = [g.num_blocks if config.num_large_pages else 0 for g in self._groups]
        self._base: Ints = np.cumsum([0, *packed])
        self._cuts = [g.blocks_per_large_page for g in self._groups]
        self._owner: Ints = np.full(config.num_large_pages, _NOBODY, np.int8)
        blocks = max(config.num_blocks, int(self._base[-1]))
        self.named: Ints = np.zeros(blocks, np.int32)
        self.written: Ints = np.zeros(blocks, np.int32)
        self.group: Ints = np.full(blocks, _NOBODY, np.int8)
        self.freed_in: Ints = np.full(blocks, _NEVER, np.int32)
        self._tables = Ragged(np.int32)  # row r in group g is r * groups + g
        self._first: Ints = np.zeros(0, np.int64)
        self._names: dict[int, str] = {}
        self._step = 0

    def step(self, output: SchedulerOutput) -> None:
        """Follow a message, then check it.

        Raises:
            IntegrityError: What the step would do is wrong; names request, block, layers and the step that freed it.
        """
        self._step = output.step
        self._leave(output.left)
        self._enter(output)
        self._drop(output)
        freed = self._numbers(output.freed[:, 0], output.freed[:, 1])
        self.freed_in[freed] = output.step
        self._check_new(output.new_blocks[:, 0], output.new_blocks[:, 1])
        self._add(output)
        self._check_freed(freed)
        self._copy(output)
        for group in range(self._count):
            if not self._groups[group].spec.content.per_request:
                self._check_entries(output, group)
                self._write(output, group)

    # ---- tables follow the message

    def _leave(self, rows: Ints) -> None:
        rows = np.unique(rows)  # after a step that failed, some are told twice
        flat = self._flat(rows[rows * self._count < len(self._tables.size)])
        np.subtract.at(self.named, self._tables.gather(flat, np.zeros_like(flat), self._tables.size[flat]), 1)
        self._tables.clear(flat)
        self._first[flat] = 0

    def _enter(self, output: SchedulerOutput) -> None:
        rows = np.array([e.row for e in output.entries], np.int64)
        if len(rows) and (rows.max() + 1) * self._count > len(self._first):
            more = 2 * int(rows.max() + 1) * self._count
            self._tables.widen(more)
            self._first = np.concatenate((self._first, np.zeros(more - len(self._first), np.int64)))
        self._leave(rows)
        self._names.update((e.row, e.request_id) for e in output.entries)

    def _drop(self, output: SchedulerOutput) -> None:
        """Take out what deltas drop at the front and replace at the end."""
        flat, deltas = self._changed(output), output.deltas
        size = self._tables.size[flat]
        front = np.minimum(deltas.drops, size)
        kept = np.minimum(size - front, deltas.keeps)
        for start, count in ((np.zeros_like(front), front), (front + kept, size - front - kept)):
            np.subtract.at(self.named, self._tables.gather(flat, start, count), 1)
        self._tables.drop_front(flat, front)
        self._tables.size[flat] = kept
        self._first[flat] += deltas.drops

    def _add(self, output: SchedulerOutput) -> None:
        deltas = output.deltas
        groups = np.repeat(deltas.groups, deltas.counts)
        blocks = self._numbers(groups, deltas.ids)
        self._tables.extend(self._changed(output), deltas.counts.astype(np.int64), blocks)
        np.add.at(self.named, blocks, 1)
        wrong = (self.group[blocks] != groups).nonzero()[0]
        if len(wrong):
            self._fail("a table names a block that was never given to its group", int(blocks[wrong[0]]))

    def _copy(self, output: SchedulerOutput) -> None:
        groups, sources, targets = output.copies.T
        self.written[self._numbers(groups, targets)] = self.written[self._numbers(groups, sources)]

    # ---- checks

    def _check_new(self, groups: Ints, ids: Ints) -> None:
        blocks = self._numbers(groups, ids)
        wrong = (self.named[blocks] > 0).nonzero()[0]
        if len(wrong):
            self._fail("a block is handed out while a table names it", int(blocks[wrong[0]]))
        self.group[blocks] = groups
        self.written[blocks] = 0
        for group in range(self._count if len(self._owner) else 0):
            pages = np.unique(ids[groups == group] // self._cuts[group])
            for page in pages[self._owner[pages] != group].tolist():
                self._give_page(page, group)

    def _give_page(self, page: int, group: int) -> None:
        """A large page goes to a group: nobody reads what another one had there."""
        owner, self._owner[page] = int(self._owner[page]), group
        if owner == _NOBODY:
            return
        cut = self._cuts[owner]
        blocks = self._base[owner] + np.arange(page * cut, (page + 1) * cut)
        self.written[blocks] = 0
        wrong = (self.named[blocks] > 0).nonzero()[0]
        if len(wrong):
            self._fail(
                f"a large page is given to group {group} while a table names a block in it", int(blocks[wrong[0]])
            )

    def _check_freed(self, freed: Ints) -> None:
        wrong = (self.named[freed] > 0).nonzero()[0]
        if len(wrong):
            self._fail("a block is freed while a table names it", int(freed[wrong[0]]))

    def _check_entries(self, output: SchedulerOutput, group: int) -> None:
        """Whole blocks that a request enters with are written to their last slots."""
        if not output.entries:
            return
        size = self._sizes[group]
        entered = np.isin(output.rows, [e.row for e in output.entries])
        flat = output.rows[entered].astype(np.int64) * self._count + group
        count = np.maximum(output.computed[entered] // size - self._first[flat], 0)
        blocks = self._tables.gather(flat, np.zeros_like(flat), count)
        wrong = (self.written[blocks] < size).nonzero()[0]
        if len(wrong):
            self._fail("a step reads a slot that was never written", int(blocks[wrong[0]]))

    def _write(self, output: SchedulerOutput, group: int) -> None:
        """The slots of the step: from where each sequence was, to its new end."""
        size = self._sizes[group]
        flat = output.rows.astype(np.int64) * self._count + group
        begin, end = output.computed.astype(np.int64), (output.computed + output.counts).astype(np.int64)
        first = begin // size
        count = (end - 1) // size - first + 1
        at = first - self._first[flat]
        short = (at + count > self._tables.size[flat]) | (at < 0)
        if np.count_nonzero(short):
            row = int(output.rows[short.nonzero()[0][0]])
            self._fail(f"the table of request {self._names.get(row)} has no block for a token that it computes", None)
        if np.count_nonzero(count > 1):
            blocks = self._tables.data[spans(self._tables.start[flat] + at, count)]
            index = spans(first, count)
            start = np.maximum(np.repeat(begin, count) - index * size, 0)
            stop = np.minimum(np.repeat(end, count) - index * size, size)
        else:  # decodes
            blocks = self._tables.data[self._tables.start[flat] + at]
            start = begin - first * size
            stop = end - first * size
        written = self.written[blocks]
        if np.count_nonzero((written != start) | (self.named[blocks] != 1)):
            self._check_writes(blocks, start, written, np.repeat(begin, count), group, output.copies)
        self.written[blocks] = stop

    def _check_writes(self, blocks: Ints, start: Ints, written: Ints, begin: Ints, group: int, copies: Ints) -> None:
        """Name the first wrong write, if one of these is wrong.

        The rest of a copied block is overwritten; where a window reads nothing back, a block begins in its middle.
        """
        first_needed = self._groups[group].spec.retention.first_needed
        reads = np.array([first_needed(position) < position for position in begin.tolist()])
        for wrong, what in (
            (self.named[blocks] > 1, "a block is written while several tables name it"),
            ((written < start) & reads, "a step reads a slot that was never written"),
            (
                (written > start) & ~np.isin(blocks, self._numbers(copies[:, 0], copies[:, 2])),
                "a step writes a slot that is written already",
            ),
        ):
            if np.count_nonzero(wrong):
                self._fail(what, int(blocks[wrong.nonzero()[0][0]]))

    def check_batch(self, output: SchedulerOutput, group: int, tables: Ints, slots: Ints) -> None:
        """Compare what kernels are given with the shadow.

        Args:
            output: The step, followed before.
            group: The group.
            tables: [S, columns] of manager blocks, the rows of the step in order.
            slots: [T], where each token of the step is written.

        Raises:
            IntegrityError: A table or a slot is another one.
        """
        size = self._sizes[group]
        flat = output.rows.astype(np.int64) * self._count + group
        position = spans(output.computed.astype(np.int64), output.counts.astype(np.int64))
        owner = np.repeat(flat, output.counts)
        block, base = (
            self._tables.data[self._tables.start[owner] + position // size - self._first[owner]],
            self._base[group],
        )
        wrong = (slots != (block - base) * size + position % size).nonzero()[0]
        if len(wrong):
            self._fail("a kernel writes through a stale table", int(slots[wrong[0]] // size + base))
        sizes = self._tables.size[flat]
        mine = self._tables.gather(flat, np.zeros_like(flat), sizes)
        theirs = tables[np.repeat(np.arange(len(flat)), sizes), spans(np.zeros_like(sizes), sizes)]
        wrong = (mine != theirs + base).nonzero()[0]
        if len(wrong):
            self._fail("a kernel reads through a stale table", int(theirs[wrong[0]] + base))

    def _fail(self, what: str, block: int | None) -> NoReturn:
        raise IntegrityError(
            what if block is None else f"{what}: {self._describe(block)}",
            field="cache.sanitize",
            got=f"step {self._step}",
            remedy="report it with the steps that lead here; it is a bug, and results from here on would be wrong",
        )

    def _describe(self, block: int) -> str:
        """Everything that is known of a block."""
        if not 0 <= block < len(self.group) or self.group[block] < 0:
            return f"a block with the number {block} that was never handed out"
        group = self._groups[self.group[block]]
        holders = [
            f"{self._names.get(flat // self._count)}"
            for flat in range(len(self._first))
            if block in self._tables.view(flat).tolist()
        ]
        freed = f"freed before step {self.freed_in[block]}" if self.freed_in[block] else "never freed"
        layers = ", ".join(map(str, group.cache_ids))
        return (
            f"block {block - self._base[group.index]} of group {group.index} (layers {layers}), {freed}, "
            f"named by the tables of {', '.join(map(repr, holders)) or 'nobody'}, "
            f"{self.written[block]} of {group.block_size} slots written"
        )

    def _numbers(self, groups: Ints, ids: Ints) -> Ints:
        numbers: Ints = ids + self._base[groups]
        return numbers

    def _flat(self, rows: Ints) -> Ints:
        each: Ints = (rows.astype(np.int64)[:, None] * self._count + np.arange(self._count)).ravel()
        return each

    def _changed(self, output: SchedulerOutput) -> Ints:
        return output.deltas.rows.astype(np.int64) * self._count + output.deltas.groups
