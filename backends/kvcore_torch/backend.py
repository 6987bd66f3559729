"""The torch backend: gather one sequence's visible keys through the block table, then multiply."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.backend import (
    AttentionBackend,
    AttentionGroup,
    AttentionLayer,
    BackendUnsupportedError,
    Batch,
    SizedLayout,
    write_tokens,
)
from kvcore_torch.attention import attend_tile
from kvcore_torch.gather import gather
from kvcore_torch.options import TorchOptions
from kvcore_torch.quant import as_bytes, decode, encode, scale_field
from kvcore_torch.step import Sequence, StepPlan, plan_step


class TorchBackend(AttentionBackend):
    """Reference and CPU backend.

    At most one sequence's keys and values exist outside the cache at a time, and of these only the blocks
    that its queries can see. Sums are float32, or float64 where queries or cache are float64.
    """

    def __init__(self, device: str, options: TorchOptions | None = None) -> None:
        self.device = torch.device(device)

    def prepare(self, batch: Batch, group: AttentionGroup) -> StepPlan:
        """Blocks, masks, tiles and write positions of the step."""
        return plan_step(batch, group, self.device, head_first=_head_first(group.layout))

    def write(
        self,
        layer: AttentionLayer,
        tensors: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: StepPlan,
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
        metadata: StepPlan,
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


def _head_first(layout: SizedLayout) -> bool:
    """Whether the fields are (head, token, dim); the other layout offered is (token, head, dim)."""
    orders = {tuple(axis.name for axis in f.axes) for f in layout.layout.fields if f.name in ("k", "v")}
    if orders == {("head", "token", "dim")}:
        return True
    if orders == {("token", "head", "dim")}:
        return False
    raise BackendUnsupportedError(
        "the torch backend cannot read this layout",
        field="layout",
        got=layout.layout.name,
        allowed="(head, token, dim) or (token, head, dim)",
    )
