"""Block tables: which blocks each row (a running request) holds, per KV group, on host and device.

    row 3   host   | 37 | 12 | 44 |  0 |  0 | ...    count 3, first_block 0
            after delta (drop_front=1, keep=2, ids=[9]):
                   | 12 | 44 |  9 |  0 |  0 | ...    count 3, first_block 1

Rows are kept across steps and changed by deltas of integers. Tables hold *kernel* blocks, which is what
kernels read: manager block b is kernel blocks ``b * r .. b * r + r - 1``; deltas are in manager blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcore.errors import CapacityError, ConfigError, IntegrityError
from kvcore.memory.staging import StagingBuffer
from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec

Int32Array = npt.NDArray[np.int32]
Ints = npt.NDArray[Any]  # integers


class RowDelta(Protocol):
    """How a row changes, in manager blocks; the manager's `TableDelta` is one."""

    @property
    def drop_front(self) -> int:
        """Blocks that leave at the front."""

    @property
    def keep(self) -> int:
        """Blocks that stay after those."""

    @property
    def ids(self) -> Sequence[int]:
        """Blocks that are appended."""


class StepDeltas(Protocol):
    """How the rows of a step change, by arrays; the manager's `TableDeltas` is one."""

    @property
    def groups(self) -> Ints:
        """The group of each delta."""

    @property
    def drops(self) -> Ints:
        """Blocks that leave at the front."""

    @property
    def keeps(self) -> Ints:
        """Blocks that stay after those."""

    @property
    def counts(self) -> Ints:
        """Blocks that are appended."""

    @property
    def ids(self) -> Ints:
        """Those of all deltas, one after the other."""


class TableRows(NamedTuple):
    """Rows of one group in the order of a batch; views of persistent buffers, valid until the next gather.

    Attributes:
        table_SN: int32 [S, columns] kernel block ids, unused entries 0, on the device.
        counts, first_block: int32 [S] on the device, in kernel blocks.
        table_host, counts_host, first_block_host: The same on the host.
    """

    table_SN: torch.Tensor
    counts: torch.Tensor
    first_block: torch.Tensor
    table_host: Int32Array
    counts_host: Int32Array
    first_block_host: Int32Array


def table_columns(config: KVCacheConfig, max_model_len: int, max_scheduled: int) -> list[int]:
    """Manager blocks that one row can hold in any step, per group: the bound that admission uses.

    Args:
        config: The plan.
        max_model_len: Longest sequence, tokens allocated ahead included.
        max_scheduled: Most tokens that one sequence is given in a step, those ahead included.
    """
    scheduled = min(max_model_len, max_scheduled)
    return [
        max(1, g.spec.retention.blocks_for_step(max_model_len, scheduled, g.block_size)) for g in config.kv_cache_groups
    ]


class GroupTable:
    """The rows of one KV group on the host.

    Attributes:
        rows_SN: int32 [max_num_seqs, columns] kernel block ids.
        counts: int32 [max_num_seqs] used columns.
        first_block: int32 [max_num_seqs] index in the sequence of column 0, in kernel blocks.
    """

    def __init__(self, group: KVCacheGroupSpec, max_num_seqs: int, columns: int) -> None:
        self.ratio = group.ratio
        # Ids below `lowest` are null blocks and belong to nobody.
        self.lowest, self.num_blocks = max(1, group.blocks_per_large_page), group.num_blocks
        self.index = group.index
        self.rows_SN: Int32Array = np.zeros((max_num_seqs, columns * self.ratio), np.int32)
        self.counts: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.first_block: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._steps = np.arange(self.ratio, dtype=np.int32)

    @property
    def columns(self) -> int:
        """Columns in kernel blocks."""
        return int(self.rows_SN.shape[1])

    def apply(self, rows: Ints, drops: Ints, keeps: Ints, counts: Ints, ids: Ints) -> None:
        """``row = row[drop:][:keep] + the next count of ids; first_block += drop``, in manager blocks.

        All are integers [n], `ids` as many as `counts` say; the rows are distinct.

        Raises:
            IntegrityError: A number is negative or an id is no block of this group; nothing has changed.
            CapacityError: A row would need more columns than the table has; nothing has changed.
        """
        if np.count_nonzero((drops < 0) | (keeps < 0)):
            got = list(zip(drops.tolist(), keeps.tolist(), strict=True))
            raise IntegrityError("a block table delta counts from 0", field="delta", got=got, allowed=">= 0")
        wrong = ids[(ids < self.lowest) | (ids >= self.num_blocks)]
        if len(wrong):
            raise IntegrityError(
                f"KV group {self.index} has no block {wrong[0]} that a request can hold",
                field="block_id",
                got=int(wrong[0]),
                allowed=f"{self.lowest} to {self.num_blocks - 1}",
            )
        r, used = self.ratio, self.counts[rows]
        kept = np.minimum(np.maximum(used - drops * r, 0), keeps * r)
        fresh = counts * r
        size = kept + fresh
        most = int(size.max(initial=0))
        if most > self.columns:
            raise CapacityError(
                f"a row of KV group {self.index} needs more columns than its block table has",
                field="block_table.columns",
                got=most // r,
                allowed=f"<= {self.columns // r}",
                remedy="raise engine.max_model_len, or schedule fewer tokens a step",
            )
        for i in ((drops > 0) & (kept > 0)).nonzero()[0].tolist():
            # The slices overlap where fewer blocks go than stay; numpy copies as if through a buffer.
            line, shift = self.rows_SN[rows[i]], int(drops[i]) * r
            line[: kept[i]] = line[shift : shift + kept[i]]
        where = np.repeat(rows * np.int64(self.columns) + kept, fresh)
        within = np.arange(len(where)) - np.repeat(fresh.cumsum() - fresh, fresh)
        self.rows_SN.reshape(-1)[where + within] = ids if r == 1 else (ids[:, None] * r + self._steps).reshape(-1)
        for i in (used > size).nonzero()[0].tolist():
            self.rows_SN[rows[i], size[i] : used[i]] = 0
        self.counts[rows] = size
        self.first_block[rows] += drops * r

    def blocks(self, row: int) -> list[int]:
        """The row's manager block ids."""
        found: list[int] = (self.rows_SN[row, : self.counts[row] : self.ratio] // self.ratio).tolist()
        return found

    def clear(self, row: int) -> None:
        """Empty the row; its next block is the sequence's first."""
        self.rows_SN[row, : self.counts[row]] = 0
        self.counts[row] = self.first_block[row] = 0

    def copy(self, source: int, target: int) -> None:
        """Make row `target` equal to row `source`."""
        for array in (self.rows_SN, self.counts, self.first_block):
            array[target] = array[source]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for array in (self.rows_SN, self.counts, self.first_block):
            array[[a, b]] = array[[b, a]]


class BlockTables:
    """The tables of all KV groups, addressed by row.

    Args:
        config: The plan.
        max_num_seqs: Rows.
        max_model_len: Longest sequence in tokens; together with the group's retention it gives the columns.
        device: Where kernels read.
        max_scheduled: Most tokens that one sequence is given in a step; `max_model_len` when None.

    Attributes:
        groups: One `GroupTable` for each KV group.
        max_num_seqs: Rows.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_num_seqs: int,
        max_model_len: int,
        device: str | torch.device,
        *,
        max_scheduled: int | None = None,
    ) -> None:
        for name, value in (("engine.max_num_seqs", max_num_seqs), ("engine.max_model_len", max_model_len)):
            if value < 1:
                raise ConfigError("block tables need rows and columns", field=name, got=value, allowed=">= 1")
        columns = table_columns(config, max_model_len, max_scheduled or max_model_len)
        self.max_num_seqs = max_num_seqs
        self.groups = tuple(
            GroupTable(g, max_num_seqs, c) for g, c in zip(config.kv_cache_groups, columns, strict=True)
        )
        sizes = [max_num_seqs * t.columns for t in self.groups]
        # Counts and first blocks of all groups first, then the tables: one leading part holds a step.
        self._table_at = [2 * max_num_seqs * len(self.groups) + sum(sizes[:i]) for i in range(len(sizes))]
        self._staging = StagingBuffer(self._table_at[-1] + sizes[-1], torch.int32, device)
        # Columns of the staged tables that may hold something, per group.
        self._dirty = [0] * len(self.groups)

    def apply(self, group: int, row: int, delta: RowDelta) -> None:
        """``row = row[drop_front:][:keep] + ids; first_block += drop_front`` in one group, in manager blocks.

        Raises:
            IntegrityError: The group, the row, a number or an id is out of range; nothing has changed.
            CapacityError: The row would need more columns than its table has; nothing has changed.
        """
        self._check(row)
        if not 0 <= group < len(self.groups):
            raise IntegrityError(
                "no such KV group in the block tables", field="group", got=group, allowed=f"0 to {len(self.groups) - 1}"
            )
        ids = np.asarray(delta.ids, dtype=np.int64)
        rows, drops, keeps, counts = np.array([[row], [delta.drop_front], [delta.keep], [len(ids)]], np.int64)
        self.groups[group].apply(rows, drops, keeps, counts, ids)

    def apply_step(self, rows: Ints, deltas: StepDeltas) -> None:
        """Apply the deltas of a step, as the manager made them.

        Args:
            rows: [n], the row of each delta in these tables.
            deltas: The step's; its own `rows` are not read.

        Raises:
            IntegrityError, CapacityError: As `apply`, of which a group is the unit.
        """
        if not len(rows):
            return
        owners = np.repeat(deltas.groups, deltas.counts) if len(self.groups) > 1 else None
        for index, table in enumerate(self.groups):
            if owners is None:
                table.apply(rows, deltas.drops, deltas.keeps, deltas.counts, deltas.ids)
                continue
            mine = deltas.groups == index
            table.apply(
                rows[mine], deltas.drops[mine], deltas.keeps[mine], deltas.counts[mine], deltas.ids[owners == index]
            )

    def clear(self, row: int) -> None:
        """Empty a row in every group."""
        self._check(row)
        for table in self.groups:
            table.clear(row)

    def copy(self, source: int, target: int) -> None:
        """Make row `target` equal to row `source` in every group (a fork)."""
        self._check(source, target)
        for table in self.groups:
            table.copy(source, target)

    def move(self, source: int, target: int) -> None:
        """Make row `target` equal to row `source`, and empty `source`."""
        self.copy(source, target)
        if source != target:
            self.clear(source)

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows in every group."""
        self._check(a, b)
        for table in self.groups:
            table.swap(a, b)

    def blocks(self, row: int) -> list[list[int]]:
        """Per group, the row's manager block ids."""
        self._check(row)
        return [table.blocks(row) for table in self.groups]

    def gather(self, rows: Sequence[int]) -> list[TableRows]:
        """The given rows, in this order, on host and device: one upload for all groups.

        Returns:
            One `TableRows` for each KV group; valid until the next call.
        """
        self._check(*rows)
        self._check_size(len(rows))
        picked = np.asarray(rows, dtype=np.int64)
        self._staging.begin()
        found = []
        for i, table in enumerate(self.groups):
            staged = self._staged(i, len(rows))
            staged.counts_host[:] = table.counts[picked]
            staged.first_block_host[:] = table.first_block[picked]
            used = int(staged.counts_host.max(initial=0))
            staged.table_host[:, :used] = table.rows_SN[picked, :used]
            self._wipe(i, staged, used)
            found.append(staged)
        self._upload(len(rows))
        return found

    def gather_null(self, counts: Sequence[Sequence[int]]) -> list[TableRows]:
        """Rows of null blocks only, for batches that measure memory; the tables do not change.

        Args:
            counts: Per group, for each row, how many kernel blocks it pretends to hold.
        """
        size = len(counts[0])
        self._check_size(size)
        self._staging.begin()
        found = []
        for i, table in enumerate(self.groups):
            staged = self._staged(i, size)
            staged.counts_host[:] = np.minimum(counts[i], table.columns)
            staged.first_block_host[:] = 0
            self._wipe(i, staged, 0)
            found.append(staged)
        self._upload(size)
        return found

    def _staged(self, group: int, size: int) -> TableRows:
        most, columns = self.max_num_seqs, self.groups[group].columns
        counts = slice(2 * group * most, 2 * group * most + size)
        first = slice(counts.start + most, counts.start + most + size)
        area = slice(self._table_at[group], self._table_at[group] + size * columns)
        host, device = self._staging.host, self._staging.device
        return TableRows(
            device[area].view(size, columns),
            device[counts],
            device[first],
            host[area].reshape(size, columns),
            host[counts],
            host[first],
        )

    def _wipe(self, group: int, staged: TableRows, used: int) -> None:
        """Zero what earlier steps left behind the used columns."""
        staged.table_host[:, used : self._dirty[group]] = 0
        self._dirty[group] = max(self._dirty[group], used)

    def _upload(self, size: int) -> None:
        self._staging.upload(self._table_at[-1] + size * self.groups[-1].columns)

    def _check_size(self, size: int) -> None:
        if size > self.max_num_seqs:
            raise IntegrityError(
                "more rows than the block tables hold", field="rows", got=size, allowed=self.max_num_seqs
            )

    def _check(self, *rows: int) -> None:
        for row in rows:
            if not 0 <= row < self.max_num_seqs:
                raise IntegrityError(
                    "no such row in the block tables", field="row", got=row, allowed=f"0 to {self.max_num_seqs - 1}"
                )
