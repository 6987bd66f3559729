"""The index work of one step and one attention group, done once for all its layers.

Every mask of the contract is an interval: query i sees the keys ``first_i <= j < end_i``. So a mask is two
integers a query, the keys that a run of queries sees are one interval too, and blocks outside it are never
touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from kvcore.backend import AttentionGroup, Batch, GroupBatch, Mask

IntArray = npt.NDArray[np.int64]
# Scores of one tile, in elements: 16 MiB of float32, however long the prompt is.
TILE_SCORES = 1 << 22
# Queries of one tile: few enough that its scores stay in a CPU's cache and that most hidden keys are left
# out, many enough for a matrix product (docs/decisions/memory.md has the figures).
TILE_QUERIES = 64
# Mask elements of one tile that are kept for the other layers of the step; larger ones are made again.
KEPT_MASK = 1 << 20


@dataclass
class Tile:
    """A run of one sequence's queries, and the keys that they see.

    Attributes:
        rows: The queries in the flat batch.
        keys: The keys, counted from the first key that was gathered for the sequence.
        positions_t: int64 [t] position of each query.
        first_t, end_t: int64 [t] each query's interval of positions.
        first_key: Position of the tile's first key.
        masked: Whether some query does not see all keys of the tile.
        empty_t: bool [t] queries that see no key at all, or None when there are none.
    """

    rows: slice
    keys: slice
    positions_t: torch.Tensor
    first_t: torch.Tensor
    end_t: torch.Tensor
    first_key: int
    masked: bool
    empty_t: torch.Tensor | None
    _hidden: torch.Tensor | None = field(default=None, repr=False)

    @property
    def num_keys(self) -> int:
        """Keys of the tile."""
        return int(self.keys.stop) - int(self.keys.start)

    def hidden_tn(self) -> torch.Tensor:
        """Bool [t, n]: keys that a query must not see."""
        if self._hidden is not None:
            return self._hidden
        key_n = self._key_positions()
        hidden = (key_n < self.first_t[:, None]) | (key_n >= self.end_t[:, None])
        if hidden.numel() <= KEPT_MASK:
            self._hidden = hidden
        return hidden

    def distance_tn(self) -> torch.Tensor:
        """int64 [t, n]: ``|i - j|``."""
        return (self.positions_t[:, None] - self._key_positions()).abs_()

    def _key_positions(self) -> torch.Tensor:
        start = self.first_key
        return torch.arange(start, start + self.num_keys, device=self.positions_t.device)


@dataclass
class Sequence:
    """One sequence of the step.

    Attributes:
        blocks: int64 [n] kernel blocks that its queries can see.
        span: The keys in them that some query sees.
        tiles: Its queries.
    """

    blocks: torch.Tensor
    span: slice
    tiles: tuple[Tile, ...]
    _rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def masked(self) -> bool:
        """Whether some tile holds a key that one of its queries must not see."""
        return any(t.masked for t in self.tiles)

    def head_rows(self, pitch: int, heads: int) -> torch.Tensor:
        """int64 [heads * n]: row ``block * pitch + head`` of each head of each block, head by head."""
        rows = self._rows.get((pitch, heads))
        if rows is None:
            each = torch.arange(heads, device=self.blocks.device)[:, None] + self.blocks * pitch
            rows = self._rows[pitch, heads] = each.view(-1)
        return rows


@dataclass(frozen=True)
class TileSchedule:
    """Metadata of the torch backend.

    Attributes:
        head_first: Whether the views are [N, head, token, dim], else [N, token, head, dim].
        sequences: What `attend` works through.
        write_rows: int64 rows of the flat batch that are written, or None for all of them.
        write_blocks, write_offsets: int64, where they go.
    """

    head_first: bool
    sequences: tuple[Sequence, ...]
    write_rows: torch.Tensor | None
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor


def schedule_tiles(batch: Batch, group: AttentionGroup, device: torch.device, *, head_first: bool) -> TileSchedule:
    """Everything that does not depend on the layer."""
    part = batch.groups[group.kv_group]
    found = list(_sequences(batch, part, group))
    joined = torch.from_numpy(np.concatenate([blocks for blocks, _, _ in found])).to(device)
    pieces = torch.split(joined, [len(blocks) for blocks, _, _ in found])
    sequences = tuple(
        Sequence(piece, span, tuple(_on_device(t, device) for t in tiles))
        for piece, (_, span, tiles) in zip(pieces, found, strict=True)
    )
    slots = part.slot_mapping_T
    # Where tokens are padding, only the others are written; on a GPU this asks the device once a step.
    written = (slots >= 0).nonzero().squeeze(1)
    rows = None if len(written) == len(slots) else written
    slots = slots if rows is None else slots[rows]
    size = part.kernel_block_size
    return TileSchedule(head_first, sequences, rows, slots.div(size, rounding_mode="floor"), slots.remainder(size))


def intervals(mask: Mask, positions: IntArray, start: int, end: int) -> tuple[IntArray, IntArray]:
    """For each query position, the first key that it sees and the one after its last.

    Args:
        mask: The layer's mask.
        positions: Query positions.
        start: Position of the first key that is there.
        end: Position after the last.
    """
    first, last = np.full_like(positions, start), np.full_like(positions, end)
    if mask.causal:
        last = np.minimum(last, positions + 1)
    if mask.window is not None:
        first = np.maximum(first, positions - mask.window + 1)
        last = np.minimum(last, positions + mask.window)
    if mask.chunk is not None:
        chunk = positions // mask.chunk
        first = np.maximum(first, chunk * mask.chunk)
        last = np.minimum(last, (chunk + 1) * mask.chunk)
    return first, np.maximum(last, first)


def _sequences(batch: Batch, part: GroupBatch, group: AttentionGroup) -> Iterator[tuple[IntArray, slice, list[Tile]]]:
    size = part.kernel_block_size
    starts = batch.query_start_loc_host
    for s in range(batch.num_seqs):
        row, stop = int(starts[s]), int(starts[s + 1])
        length = int(batch.seq_lens_host[s])
        start = int(part.first_block_host[s]) * size
        end = start + int(part.kv_lens_host[s])
        positions = np.arange(length - (stop - row), length, dtype=np.int64)
        first, last = intervals(group.query.mask, positions, start, end)
        low, high = _union(first, last)
        # Blocks from the one that holds the first visible key to the one that holds the last.
        column, columns = (low - start) // size, -((start - high) // size)
        origin = start + column * size
        tiles = list(_tiles(group.query.num_heads, row, positions, first, last, low))
        blocks = part.block_table_host[s, column:columns].astype(np.int64)
        yield blocks, slice(low - origin, high - origin), tiles


def _union(first: IntArray, last: IntArray) -> tuple[int, int]:
    """The keys that at least one query sees: both bounds rise with the query, so no key lies between."""
    seen = first < last
    if not seen.any():
        return int(first[0]), int(first[0])
    return int(first[seen][0]), int(last[seen][-1])


def _tiles(
    num_heads: int, row: int, positions: IntArray, first: IntArray, last: IntArray, origin: int
) -> Iterator[Tile]:
    longest = max(1, int((last - first).max()))
    step = max(1, min(TILE_QUERIES, TILE_SCORES // (num_heads * longest)))
    for a in range(0, len(positions), step):
        b = min(a + step, len(positions))
        low, high = _union(first[a:b], last[a:b])
        empty = first[a:b] >= last[a:b]
        yield Tile(
            rows=slice(row + a, row + b),
            keys=slice(low - origin, high - origin),
            positions_t=torch.from_numpy(positions[a:b]),
            first_t=torch.from_numpy(first[a:b]),
            end_t=torch.from_numpy(last[a:b]),
            first_key=low,
            masked=bool((first[a:b] != low).any() or (last[a:b] != high).any()),
            empty_t=torch.from_numpy(empty) if empty.any() else None,
        )


def _on_device(tile: Tile, device: torch.device) -> Tile:
    if device.type == "cpu":
        return tile
    return replace(
        tile,
        positions_t=tile.positions_t.to(device),
        first_t=tile.first_t.to(device),
        end_t=tile.end_t.to(device),
        empty_t=None if tile.empty_t is None else tile.empty_t.to(device),
    )
