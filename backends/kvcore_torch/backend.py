"""The torch backend: gather one sequence's visible keys through the block table, then multiply."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.backend import AttentionBackend, AttentionGroup, AttentionLayer, Batch, write_tokens
from kvcore_torch.attention import attend_tile
from kvcore_torch.gather import gather
from kvcore_torch.options import TorchOptions
from kvcore_torch.quant import as_bytes, decode, encode, scale_field
from kvcore_torch.tile_schedule import Sequence, TileSchedule, schedule_tiles


class TorchBackend(AttentionBackend):
    """Reference and CPU backend.

    At most one sequence's keys and values exist outside the cache at a time, and of these only the blocks
    that its queries can see. Sums are float32, or float64 where queries or cache are float64.
    """

    def __init__(self, device: str, options: TorchOptions | None = None) -> None:
        self.device = torch.device(device)

    def prepare(self, batch: Batch, group: AttentionGroup) -> TileSchedule:
        """Blocks, masks, tiles and write positions of the step."""
        return schedule_tiles(batch, group, self.device, head_first=group.layout.layout.kv_order("nhd", "hnd") == "hnd")

    def write(
        self,
        layer: AttentionLayer,
        tensors: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: TileSchedule,
    ) -> None:
        """Keys and values into their slots, converted to the cache's dtype, or quantized."""
        rows = slice(len(metadata.write_blocks)) if metadata.write_rows is None else metadata.write_rows
        for name in ("k", "v"):
            values = tensors[name][rows]
            fields = {name: values}
            if layer.query.quant is not None:
                fields = encode(layer, name, values, cache[name].dtype)
            for field_name, stored in fields.items():
                field = as_bytes(cache[field_name])
                if metadata.head_first:
                    field = field.transpose(1, 2)
                write_tokens(field, as_bytes(stored), metadata.write_blocks, metadata.write_offsets)

    def attend(
        self,
        layer: AttentionLayer,
        query: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: TileSchedule,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Sequence by sequence; everything is read from the cache."""
        for sequence in metadata.sequences:
            self._attend_sequence(layer, query["q"], cache, metadata.head_first, sequence, out, lse)

    def _attend_sequence(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        head_first: bool,
        sequence: Sequence,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        wide = torch.float64 in (query_THD.dtype, cache["k"].dtype)
        dtype = torch.float64 if wide else torch.float32
        keys, values = (_read(layer, name, cache, sequence, dtype, head_first=head_first) for name in ("k", "v"))
        finite = not sequence.masked or bool(torch.isfinite(values).all())
        for tile in sequence.tiles:
            rows = tile.rows
            attend_tile(
                layer,
                query_THD[rows],
                keys[:, tile.keys],
                values[:, tile.keys],
                tile,
                out[rows],
                None if lse is None else lse[rows],
                finite_values=finite,
            )


def _read(
    layer: AttentionLayer,
    name: str,
    cache: Mapping[str, torch.Tensor],
    sequence: Sequence,
    dtype: torch.dtype,
    *,
    head_first: bool,
) -> torch.Tensor:
    """Keys or values [K, n, D] that the sequence's queries can see, as numbers."""
    values = gather(cache[name], sequence, dtype, head_first=head_first)
    if layer.query.quant is None:
        return values
    field = scale_field(cache, name)
    if field is None:
        return decode(layer, name, values, None)
    scales = gather(field.unsqueeze(-1), sequence, torch.float32, head_first=head_first)
    return decode(layer, name, values, scales.squeeze(-1))
