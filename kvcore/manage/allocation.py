"""`StepAllocation`: what a step gets. Integers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvcore.manage.ragged import Ints


class TableDeltas(NamedTuple):
    """How rows of block tables change; what is not named stays as it is.

    ::

        row = row[drop:][:keep] + the next `count` of `ids`
        first_block = first_block + drop

    The row of a request that enters (by admission or by fork) starts as empty, with first_block 0.

    Attributes:
        rows, groups: int32 [n], which.
        drops: int32 [n], entries that fall out at the front; may exceed the length of the row.
        keeps: int32 [n], entries kept after that; those behind them are replaced.
        counts: int32 [n], new entries at the end.
        ids: int32 [sum of counts], the new entries of all, one after the other.
    """

    rows: Ints
    groups: Ints
    drops: Ints
    keeps: Ints
    counts: Ints
    ids: Ints

    def and_then(self, others: TableDeltas) -> TableDeltas:
        """These and those of other rows."""
        return TableDeltas(*map(np.concatenate, zip(self, others, strict=True)))


@dataclass(frozen=True)
class StepAllocation:
    """The blocks of one step.

    Attributes:
        step: Number of the step, from 1.
        rows: int64 [n], the requests as they were asked for.
        starts, ends: int64 [n], the tokens of each that the step computes.
        deltas: How block tables change: theirs, and those of requests that are not in the step and gave up blocks.
        copies: int32 [n, 3] (group, from block, to block), to be done before the model runs.
        new_blocks: int32 [n, 2] (group, block) handed out in this step; their old content is of no use.
        cached_tokens: Per row admitted in this step, the tokens that the prefix cache gave it.
        dead: int32 [n, 2] (group that wrote it, block) whose content died since the step before, where the manager
            tracks that; a block may be dead and new in one step.
        freed: int32 [n, 2] (group, block) without a holder now that lost the last one since the step before, likewise.
    """

    step: int
    rows: Ints
    starts: Ints
    ends: Ints
    deltas: TableDeltas
    copies: Ints
    new_blocks: Ints
    cached_tokens: Mapping[int, int]
    dead: Ints
    freed: Ints

    def as_ids(self, first: Ints) -> StepAllocation:
        """The same in ids of each group, where the manager numbers blocks over all groups.

        Args:
            first: By group, the number of its first id.
        """
        if not any(map(len, (self.new_blocks, self.deltas.ids, self.copies, self.dead, self.freed))):
            return self
        first = first.astype(np.int32)
        second, both = np.array([0, 1], np.int32), np.array([0, 1, 1], np.int32)
        return replace(
            self,
            deltas=self.deltas._replace(ids=self.deltas.ids - first[self.deltas.groups.repeat(self.deltas.counts)]),
            copies=self.copies - first[self.copies[:, :1]] * both,
            new_blocks=self.new_blocks - first[self.new_blocks[:, :1]] * second,
            freed=self.freed - first[self.freed[:, :1]] * second,
            dead=self.dead - first[self.dead[:, :1]] * second,
        )
