"""One step as padded calls: all rows of one token in one, every longer row in one of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcore.attention.backend import AttentionGroup
from kvcore.attention.batch import Batch, GroupBatch

SEQUENCE_BUCKETS = (1, 8, 32, 128, 512, 2048)
QUERY_BUCKETS = (1, 16, 64, 256, 1024, 4096)
COLUMN_BUCKETS = (16, 64, 256, 1024, 4096, 16384)


@dataclass
class Call:
    """One launch over S padded sequences of Q padded queries.

    Attributes:
        rows_SQ: int64 row of each query in the flat batch; -1 is padding.
        positions_SQ: int64 position of each query.
        table_SN: int64 block ids; padding is the null block.
        origin_S: int64 position of the first key of the table.
        length_S: int64 position after the last key.
    """

    rows_SQ: torch.Tensor
    positions_SQ: torch.Tensor
    table_SN: torch.Tensor
    origin_S: torch.Tensor
    length_S: torch.Tensor


@dataclass
class Step:
    """Metadata of the partitioned backend."""

    size: int
    calls: list[Call]
    write_rows: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor


def bucket(sizes: tuple[int, ...], count: int) -> int:
    """The smallest bucket that holds `count`."""
    return next(size for size in sizes if size >= count)


def plan_step(batch: Batch, group: AttentionGroup) -> Step:
    """The calls of a step."""
    part = batch.groups[group.kv_group]
    size = part.kernel_block_size
    scheduled = np.diff(batch.query_start_loc_host)
    single = [s for s in range(batch.num_seqs) if scheduled[s] == 1]
    calls = [padded(batch, part, size, single)] if single else []
    calls += [padded(batch, part, size, [s]) for s in range(batch.num_seqs) if scheduled[s] > 1]
    slots = part.slot_mapping_T[: batch.num_tokens]
    write_rows = (slots >= 0).nonzero().squeeze(1)
    written = slots[write_rows]
    return Step(size, calls, write_rows, written // size, written % size)


def padded(batch: Batch, part: GroupBatch, size: int, sequences: list[int]) -> Call:
    """Some sequences of a step, padded to buckets."""
    starts = batch.query_start_loc_host
    counts = [int(starts[s + 1] - starts[s]) for s in sequences]
    many = bucket(SEQUENCE_BUCKETS, len(sequences))
    most = bucket(QUERY_BUCKETS, max(counts))
    columns = max(int(part.counts_host[s]) for s in sequences)
    wide = bucket(COLUMN_BUCKETS, max(1, columns))
    rows_SQ = np.full((many, most), -1, np.int64)
    positions_SQ = np.zeros((many, most), np.int64)
    table_SN = np.zeros((many, wide), np.int64)
    origin_S, length_S = np.zeros(many, np.int64), np.zeros(many, np.int64)
    for i, s in enumerate(sequences):
        count = counts[i]
        used = int(part.counts_host[s])
        length = int(batch.seq_lens_host[s])
        rows_SQ[i, :count] = np.arange(starts[s], starts[s] + count)
        positions_SQ[i, :count] = np.arange(length - count, length)
        table_SN[i, :used] = part.block_table_host[s, :used]
        origin_S[i] = int(part.first_block_host[s]) * size
        length_S[i] = length
    return Call(*(torch.from_numpy(x) for x in (rows_SQ, positions_SQ, table_SN, origin_S, length_S)))
