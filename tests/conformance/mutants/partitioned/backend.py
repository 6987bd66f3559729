"""The partitioned backend: padded batches over partitions of keys, one decision a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch

from .kernels import HeadFacts, one_partition, reduce
from .step import Call, Step, plan_step

Tensors = Mapping[str, torch.Tensor]


class PartitionedBackend(AttentionBackend):
    """Sums are float32."""

    def __init__(self, device: str, options: Any) -> None:
        self.device = torch.device(device)
        self.partition = options.partition

    def prepare(self, batch: Batch, group: AttentionGroup) -> Step:
        """The calls of the step."""
        return plan_step(batch, group)

    def write(self, layer: AttentionLayer, tensors: Tensors, cache: Tensors, metadata: Step) -> None:
        """Keys into (head, dim / x, token, x), values into (head, dim, token)."""
        block, offset = metadata.write_blocks, metadata.write_offsets
        k_TKD = self.stored(layer, "k", tensors["k"][metadata.write_rows], cache["k"])
        v_TKV = self.stored(layer, "v", tensors["v"][metadata.write_rows], cache["v"])
        keys, values = as_bytes(cache["k"]), as_bytes(cache["v"])
        keys[block, :, :, offset] = k_TKD.view(len(block), keys.shape[1], keys.shape[2], keys.shape[4])
        values[block, :, :, offset] = v_TKV

    def stored(self, layer: AttentionLayer, name: str, x_TKD: torch.Tensor, field: torch.Tensor) -> torch.Tensor:
        """What the field holds for keys or values."""
        if layer.query.quant is None:
            return x_TKD.to(field.dtype)
        top = torch.finfo(field.dtype).max
        scaled = x_TKD.float() / self.scale(layer, name)
        return as_bytes(scaled.clamp(-top, top).to(field.dtype))

    def scale(self, layer: AttentionLayer, name: str) -> torch.Tensor:
        """The layer's scale, [] or [K, 1]."""
        found = layer.k_scale if name == "k" else layer.v_scale
        return found[:, None] if found.dim() else found

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensors,
        cache: Tensors,
        metadata: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Call by call, partition by partition."""
        facts = HeadFacts(layer.alibi_slopes, layer.sinks)
        for call in metadata.calls:
            used = call.rows_SQ >= 0
            rows = call.rows_SQ.clamp(min=0)
            q_SHQD = query["q"][rows].transpose(1, 2).float()
            parts = []
            held = int((call.length_S - call.origin_S).max())
            for first in range(0, max(held, 1), self.partition):
                stop = min(first + self.partition, max(held, 1))
                k_SKpD = self.keys(layer, cache["k"], call, metadata.size, first, stop)
                v_SKpV = self.values(layer, cache["v"], call, metadata.size, first, stop)
                start_S = call.origin_S + first
                parts.append(one_partition(layer.query, facts, call, q_SHQD, k_SKpD, v_SKpV, start_S))
            found_SHQV, found_SHQ = reduce(facts, parts)
            out[rows[used]] = found_SHQV.transpose(1, 2)[used].to(out.dtype)
            if lse is not None:
                lse[rows[used]] = found_SHQ.transpose(1, 2)[used]

    def keys(
        self, layer: AttentionLayer, field: torch.Tensor, call: Call, size: int, first: int, stop: int
    ) -> torch.Tensor:
        """float32 [S, K, keys, D]; keys are counted from the first of the table."""
        block, offset = self.places(call, size, first, stop)
        picked = as_bytes(field).permute(0, 3, 1, 2, 4)[block, offset].view(field.dtype)
        return self.numbers(layer, "k", picked.flatten(3)).transpose(1, 2)

    def values(
        self, layer: AttentionLayer, field: torch.Tensor, call: Call, size: int, first: int, stop: int
    ) -> torch.Tensor:
        """float32 [S, K, keys, Dv]."""
        block, offset = self.places(call, size, first, stop)
        picked = as_bytes(field).permute(0, 3, 1, 2)[block, offset].view(field.dtype)
        return self.numbers(layer, "v", picked).transpose(1, 2)

    def places(self, call: Call, size: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks [S, keys] and offsets [S, keys]; keys past a row's own end lie in the null block."""
        key = torch.arange(first, stop)
        column = (key // size).clamp(max=call.table_SN.shape[1] - 1)
        block = call.table_SN[:, column]
        return block, (key % size).expand(len(block), -1)

    def numbers(self, layer: AttentionLayer, name: str, x_SpKD: torch.Tensor) -> torch.Tensor:
        """float32 numbers that stored elements stand for."""
        wide = x_SpKD.float()
        return wide if layer.query.quant is None else wide * self.scale(layer, name)


def as_bytes(field: torch.Tensor) -> torch.Tensor:
    """An fp8 field as bytes: torch indexes those."""
    return field.view(torch.uint8) if field.itemsize == 1 else field
