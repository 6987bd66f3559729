"""`BatchBuilder`: from rows and counts to the `Batch` that kernels see, in persistent buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcore.attention.batch import Batch, GroupBatch, Int32Array
from kvcore.errors import CapacityError, IntegrityError, NotBuiltError
from kvcore.memory.block_table import BlockTables, TableRows
from kvcore.memory.kernels.slot_mapping import slot_mapping
from kvcore.memory.slot_mapping import (
    PADDING_SLOT,
    check_ranks,
    dummy_split,
    local_length,
    query_start_loc,
    token_positions,
)
from kvcore.memory.staging import StagingBuffer
from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec


class BatchBuilder:
    """Assembles one `Batch` a step. A batch is valid until the next `build`: its tensors are views.

    Args:
        config: The plan.
        max_num_seqs: Most sequences of a step.
        max_num_batched_tokens: Most tokens of a step.
        device: Where kernels read.
        world, rank: Ranks that contexts are interleaved over (token i lies on rank ``i % world``), and
            this one. Tables, `kv_lens` and slots then count this rank's tokens.

    Attributes:
        positions_T: int64 [max_num_batched_tokens] position of each token of the last batch.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: str | torch.device,
        *,
        world: int = 1,
        rank: int = 0,
    ) -> None:
        check_ranks(world, rank)
        for group in config.kv_cache_groups:
            if group.spec.kind == "encoder":
                raise NotBuiltError(
                    "batches of cross attention are not built yet: their keys have lengths of their own",
                    field="retention",
                    got="encoder",
                    remedy="use a decoder-only model",
                )
        self.groups = config.kv_cache_groups
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_num_batched_tokens
        self.world, self.rank = world, rank
        seqs, count = max_num_seqs, len(self.groups)
        # query_start_loc | seq_lens | num_computed | kv_lens of each group
        self._lengths = StagingBuffer((3 + count) * seqs + 1, torch.int32, device)
        self._positions = StagingBuffer(self.max_tokens, torch.int64, device)
        self.positions_T = self._positions.device
        self._slots = [
            torch.full((self.max_tokens,), PADDING_SLOT, dtype=torch.int64, device=device) for _ in range(count)
        ]

    def build(
        self, rows: Sequence[int], num_scheduled: Sequence[int], num_computed: Sequence[int], tables: BlockTables
    ) -> Batch:
        """The batch of one step.

        Args:
            rows: Table row of each sequence, decodes first.
            num_scheduled: Tokens of each sequence in this step, at least 1.
            num_computed: Tokens of each sequence that are in the cache already.
            tables: The block tables, this step's deltas applied.

        Raises:
            CapacityError: More sequences or tokens than the buffers hold.
            IntegrityError: A count is impossible, or a row does not hold the blocks of its tokens.
        """
        self._check(rows, num_scheduled, num_computed)
        return self._fill(num_scheduled, num_computed, tables.gather(rows), write=True)

    def dummy(self, num_tokens: int, num_seqs: int, tables: BlockTables) -> Batch:
        """A batch that only measures memory: sequences of even length that own no block and write nothing.

        Its tables are all null blocks, so that kernels read zeros.
        """
        scheduled = dummy_split(num_tokens, num_seqs)
        computed = [0] * num_seqs
        self._check(range(num_seqs), scheduled, computed)
        found = tables.gather_null([self._null_counts(g, scheduled) for g in self.groups])
        return self._fill(scheduled, computed, found, write=False)

    def _null_counts(self, group: KVCacheGroupSpec, lengths: Sequence[int]) -> list[int]:
        if group.spec.content.per_request:
            return [1] * len(lengths)
        return [-(-n // group.kernel_block_size) for n in lengths]

    def _fill(
        self, scheduled: Sequence[int], computed: Sequence[int], found: Sequence[TableRows], *, write: bool
    ) -> Batch:
        size, most = len(scheduled), self.max_num_seqs
        starts = query_start_loc(scheduled)
        tokens = int(starts[-1])
        self._lengths.begin()
        self._positions.begin()
        host = self._lengths.host
        areas = [slice(0, size + 1)] + [
            slice(1 + i * most, 1 + i * most + size) for i in range(1, 3 + len(self.groups))
        ]
        loc, lens, done = (host[area] for area in areas[:3])
        loc[:] = starts
        done[:] = computed
        lens[:] = done + np.asarray(scheduled, np.int32)
        for group, rows, area in zip(self.groups, found, areas[3:], strict=True):
            host[area] = self._kv_lens(group, rows, lens)
        if write:
            self._check_tables(found, areas[3:])
        self._lengths.upload(areas[-1].stop)
        self._positions.host[:tokens] = token_positions(scheduled, computed)
        self._positions.upload(tokens)
        device = self._lengths.device
        groups = tuple(
            self._group_batch(i, rows, (areas[0], areas[2], area), tokens, write)
            for i, (rows, area) in enumerate(zip(found, areas[3:], strict=True))
        )
        decodes = [n == 1 and c > 0 for n, c in zip(scheduled, computed, strict=True)]
        return Batch(
            query_start_loc=device[areas[0]],
            seq_lens=device[areas[1]],
            num_computed=device[areas[2]],
            query_start_loc_host=loc,
            seq_lens_host=lens,
            num_computed_host=done,
            groups=groups,
            num_tokens=tokens,
            # The leading run: a prefill may leave one token for a later sequence of the batch.
            num_decodes=decodes.index(False) if False in decodes else size,
            max_query_len=max(scheduled),
            max_seq_len=int(lens.max()),
            padded_tokens=tokens,
            capacity_seqs=most,
            capacity_tokens=self.max_tokens,
        )

    def _kv_lens(self, group: KVCacheGroupSpec, rows: TableRows, seq_lens: Int32Array) -> Int32Array:
        """Keys that each row's table holds on this rank."""
        if group.spec.content.per_request:
            return rows.counts_host
        held: Int32Array = (
            local_length(seq_lens, self.world, self.rank) - rows.first_block_host * group.kernel_block_size
        )
        return np.maximum(held, 0)

    def _check_tables(self, found: Sequence[TableRows], areas: Sequence[slice]) -> None:
        for group, rows, area in zip(self.groups, found, areas, strict=True):
            room = rows.counts_host * (1 if group.spec.content.per_request else group.kernel_block_size)
            short = np.flatnonzero(room < self._lengths.host[area])
            if short.size:
                s = int(short[0])
                raise IntegrityError(
                    f"sequence {s} of the batch lacks blocks in KV group {group.index} for its tokens",
                    field="block_table",
                    got=f"room for {room[s]} tokens",
                    allowed=f">= {self._lengths.host[area][s]} tokens",
                    remedy="apply the step's table deltas before the batch is built",
                )

    def _group_batch(
        self, index: int, rows: TableRows, areas: tuple[slice, slice, slice], tokens: int, write: bool
    ) -> GroupBatch:
        group, slots = self.groups[index], self._slots[index][:tokens]
        starts, computed, held = areas
        if write and not group.spec.content.per_request:
            slot_mapping(
                rows.table_SN,
                rows.first_block,
                self._lengths.device[starts],
                self._lengths.device[computed],
                group.kernel_block_size,
                slots,
                world=self.world,
                rank=self.rank,
            )
        else:
            slots.fill_(PADDING_SLOT)
        return GroupBatch(
            kernel_block_size=group.kernel_block_size,
            block_table_SN=rows.table_SN,
            counts=rows.counts,
            first_block=rows.first_block,
            kv_lens=self._lengths.device[held],
            slot_mapping_T=slots,
            block_table_host=rows.table_host,
            counts_host=rows.counts_host,
            first_block_host=rows.first_block_host,
            kv_lens_host=self._lengths.host[held],
        )

    def _check(self, rows: Sequence[int], scheduled: Sequence[int], computed: Sequence[int]) -> None:
        size, tokens = len(rows), sum(scheduled)
        if not size or len(scheduled) != size or len(computed) != size:
            raise IntegrityError(
                "a batch needs rows, each with its scheduled and computed tokens",
                field="batch",
                got=(size, len(scheduled), len(computed)),
                allowed="three equal lengths >= 1",
            )
        if min(scheduled) < 1 or min(computed) < 0:
            raise IntegrityError(
                "a sequence of a batch has at least one scheduled token and none computed below 0",
                field="num_scheduled",
                got=(min(scheduled), min(computed)),
                allowed=">= 1 and >= 0",
            )
        if size > self.max_num_seqs or tokens > self.max_tokens:
            raise CapacityError(
                "the step does not fit the persistent buffers",
                field="batch",
                got=f"{size} sequences, {tokens} tokens",
                allowed=f"<= {self.max_num_seqs} sequences, <= {self.max_tokens} tokens",
                remedy="raise engine.max_num_seqs or engine.max_num_batched_tokens",
            )
