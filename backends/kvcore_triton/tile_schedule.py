"""Which program does what: the list of work items of one step, made on the host.

Lengths are known on the host, so no device is asked. Sequences with few query rows and those with many go
into two lists, since they want tiles of unlike height.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.backend import Batch, GroupBatch, Mask

IntArray = npt.NDArray[np.int64]
# Columns of an item, as `kernels.attention` names them, and of a merge.
ITEM_COLUMNS, MERGE_COLUMNS = 9, 4
# Stands for "no window" and "no chunk"; positions stay below it.
NO_LIMIT = 1 << 30


class Splits(NamedTuple):
    """How keys are split.

    Attributes:
        programs: Programs wanted at once, over all KV heads.
        heads: Programs that each item becomes (KV heads, times their head tiles).
        min_keys: Fewest keys of a split.
        fixed: Splits of every tile, or 0 to let the lengths decide.
        step: Splits are multiples of this many keys.
    """

    programs: int
    heads: int
    min_keys: int
    fixed: int
    step: int


class TileSchedule(NamedTuple):
    """The work items of some sequences.

    Attributes:
        items: int64 [n, 9], see the kernel.
        merges: int64 [m, 4] (first query, queries, first partial, partials) of tiles that are split.
        partials: Partial results of split tiles, that is places of the workspace in use.
    """

    items: IntArray
    merges: IntArray
    partials: int


def interval(mask: Mask) -> tuple[int, int, int]:
    """(window, right, chunk): query i sees keys from i - window + 1 to i + right - 1 of its chunk."""
    window = NO_LIMIT if mask.window is None else mask.window
    return window, 1 if mask.causal else window, NO_LIMIT if mask.chunk is None else mask.chunk


def schedule_tiles(
    batch: Batch, group: GroupBatch, mask: Mask, seqs: IntArray, queries: int, splits: Splits
) -> TileSchedule:
    """The work of some sequences.

    Args:
        batch: The step.
        group: Its part for the KV group.
        mask: The layers' mask.
        seqs: [n] sequences.
        queries: Queries of a tile.
        splits: How keys are split.
    """
    starts = batch.query_start_loc_host.astype(np.int64)
    lengths = np.diff(starts)[seqs]
    tiles_each = -(-lengths // queries)
    owner = np.repeat(np.arange(len(seqs)), tiles_each)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(tiles_each) - tiles_each, tiles_each)
    seq, done = seqs[owner], index * queries
    count = np.minimum(queries, lengths[owner] - done)
    position = batch.seq_lens_host[seq].astype(np.int64) - lengths[owner] + done
    start = group.first_block_host[seq].astype(np.int64) * group.kernel_block_size
    keys_end = start + group.kv_lens_host[seq]
    begin, end = _union(mask, position, position + count - 1, start, keys_end)
    tiles = np.stack(
        [seq, starts[seq] + done, count, position, begin, end, start, keys_end, np.full_like(seq, -1)], axis=1
    )
    return _split(tiles, splits)


def _union(mask: Mask, low: IntArray, high: IntArray, start: IntArray, keys_end: IntArray) -> tuple[IntArray, IntArray]:
    """The keys that some query from `low` to `high` sees: both bounds rise with the query."""
    window, right, chunk = interval(mask)
    begin = np.maximum(np.maximum(low - window + 1, low // chunk * chunk), start)
    end = np.minimum(np.minimum(high + right, (high // chunk + 1) * chunk), keys_end)
    return begin, np.maximum(begin, end)


def _split(tiles: IntArray, splits: Splits) -> TileSchedule:
    keys = tiles[:, 5] - tiles[:, 4]
    if splits.fixed:
        each = -(-keys // splits.fixed)
    else:
        # Splits of equal length, so that long and short sequences fill the device together.
        share = -(-int(keys.sum()) * splits.heads // max(1, splits.programs))
        each = np.full_like(keys, max(share, splits.min_keys))
    each = np.maximum(-(-each // splits.step) * splits.step, splits.step)
    counts = np.maximum(-(-keys // each), 1)
    owner = np.repeat(np.arange(len(tiles)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    items = tiles[owner]
    items[:, 4] += index * each[owner]
    items[:, 5] = np.minimum(items[:, 4] + each[owner], items[:, 5])
    several = counts[owner] > 1
    partials = int(several.sum())
    items[several, 8] = np.arange(partials)
    split = np.flatnonzero(counts > 1)
    first = np.cumsum(counts[split]) - counts[split]
    merges = np.stack([tiles[split, 1], tiles[split, 2], first, counts[split]], axis=1)
    return TileSchedule(items, merges, partials)
