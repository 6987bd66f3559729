"""Metadata of one step and attention group, in buffers whose addresses stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvcore.backend import AttentionGroup, AttentionQuery, Batch, GroupBatch, StagingBuffer
from kvcore_triton.options import TritonOptions
from kvcore_triton.targets import Target, Tile, tile
from kvcore_triton.tile_schedule import ITEM_COLUMNS, MERGE_COLUMNS, Splits, TileSchedule, schedule_tiles

# Query rows of one sequence and KV head up to which the short tile serves.
FEW_ROWS = 16
# Programs for each processor that splitting aims at.
PROGRAMS_PER_PROCESSOR = 2


class Launch(NamedTuple):
    """One launch of the attention kernel, and of the merge where tiles are split.

    Attributes:
        tile: Its sizes.
        heads: Query heads of a tile; several tiles share a KV head where it has more.
        tiles_per_head: Tiles for each KV head.
        items: int32 [n, 9] on the device.
        merges: int32 [m, 4] on the device.
        partials: Partial results of split tiles, that is places of the workspace in use.
    """

    tile: Tile
    heads: int
    tiles_per_head: int
    items: torch.Tensor
    merges: torch.Tensor
    partials: int


@dataclass(frozen=True)
class LaunchPlan:
    """What `write` and `attend` need; valid until the next `prepare` of the group.

    Attributes:
        group: The KV group's part of the batch.
        heads_first: Order of the axes in the views.
        launches: Launches.
    """

    group: GroupBatch
    heads_first: bool
    launches: tuple[Launch, ...]


class LaunchPlanner:
    """The buffer of one attention group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: StagingBuffer | None = None

    def plan(
        self, batch: Batch, group: AttentionGroup, target: Target, processors: int, options: TritonOptions
    ) -> LaunchPlan:
        """The step's launches; one upload."""
        part, query = batch.groups[group.kv_group], group.query
        lengths = np.diff(batch.query_start_loc_host)
        few = lengths * query.group_size <= FEW_ROWS
        schedules: list[tuple[Tile, int, int, TileSchedule]] = []
        for short in (True, False):
            seqs = np.flatnonzero(few if short else ~few).astype(np.int64)
            if seqs.size:
                schedules.append(_launch(batch, part, query, target, processors, options, seqs, short))
        launches = self._upload(schedules, 4 * (batch.capacity_tokens + batch.capacity_seqs))
        return LaunchPlan(part, group.layout.layout.kv_order("nhd", "hnd") == "hnd", launches)

    def _upload(self, schedules: list[tuple[Tile, int, int, TileSchedule]], least: int) -> tuple[Launch, ...]:
        size = sum(_padded(w.items.size) + _padded(w.merges.size) for *_, w in schedules)
        if self._staging is None or self._staging.host.size < size:
            # Sized for the step's limits at once: growing is for forced splits.
            self._staging = StagingBuffer(max(size, ITEM_COLUMNS * least), torch.int32, self._device)
        staging, at, found = self._staging, 0, []
        staging.begin()
        for sizes, heads, per_head, schedule in schedules:
            places = []
            for array, columns in ((schedule.items, ITEM_COLUMNS), (schedule.merges, MERGE_COLUMNS)):
                staging.host[at : at + array.size] = array.reshape(-1)
                places.append(staging.device[at : at + array.size].view(-1, columns))
                at += _padded(array.size)
            found.append(Launch(sizes, heads, per_head, places[0], places[1], schedule.partials))
        staging.upload(at)
        return tuple(found)


def _launch(
    batch: Batch,
    part: GroupBatch,
    query: AttentionQuery,
    target: Target,
    processors: int,
    options: TritonOptions,
    seqs: np.typing.NDArray[np.int64],
    short: bool,
) -> tuple[Tile, int, int, TileSchedule]:
    sizes = tile_for(query, target, options, short=short)
    heads = min(query.group_size, sizes.block_m)
    per_head = -(-query.group_size // heads)
    splits = Splits(
        programs=processors * PROGRAMS_PER_PROCESSOR,
        heads=query.num_kv_heads * per_head,
        min_keys=max(target.min_split_keys, sizes.block_n),
        fixed=options.num_splits,
        step=sizes.block_n,
    )
    return sizes, heads, per_head, schedule_tiles(batch, part, query.mask, seqs, sizes.block_m // heads, splits)


def _padded(size: int) -> int:
    """`size` up to the next 16 bytes: for an array that starts elsewhere Triton compiles the kernel anew."""
    return -(-size // 4) * 4


def max_partials(processors: int) -> int:
    """Parts that split tiles leave at once, over all programs, unless a number of splits is forced.

    Only the last split of a tile is shorter than the share of a program aimed at, so that tiles that are
    split have less than twice as many splits as there are such programs.
    """
    return 2 * PROGRAMS_PER_PROCESSOR * processors


def max_block_m(query: AttentionQuery, target: Target, options: TritonOptions) -> int:
    """Rows of the max_block_m tile of a layer."""
    return max(tile_for(query, target, options, short=short).block_m for short in (True, False))


def tile_for(query: AttentionQuery, target: Target, options: TritonOptions, *, short: bool) -> Tile:
    """The table's tile, with what the options override."""
    found = tile(
        target,
        few=short,
        head_dim=query.head_dim,
        head_dim_v=query.head_dim_v,
        wide=query.dtype == "float32",
        quantized=query.quant is not None,
    )
    return Tile(
        options.block_m or found.block_m,
        options.block_n or found.block_n,
        options.num_warps or found.num_warps,
        options.num_stages or found.num_stages,
    )
