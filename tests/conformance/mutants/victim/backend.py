"""The dense reference backend: plain, slow, and whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch

from .softmax import attend_dense
from .step import SequenceStep, Step, plan_step
from .store import decode, encode, in_token_order, put, take

Tensors = Mapping[str, torch.Tensor]


class ReferenceBackend(AttentionBackend):
    """Reads and writes by slot; sums are float32, or float64 where queries or cache are."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def prepare(self, batch: Batch, group: AttentionGroup) -> Step:
        """Positions and slots."""
        return plan_step(batch, group, self.device)

    def write(self, layer: AttentionLayer, tensors: Tensors, cache: Tensors, metadata: Step) -> None:
        """Keys and values, converted or quantized, into their slots."""
        for name in ("k", "v"):
            values = tensors[name][metadata.write_rows]
            for field, stored in encode(layer, name, values, cache[name].dtype).items():
                view = in_token_order(field, cache[field], metadata.layout)
                put(view, metadata.write_slots, metadata.size, stored)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensors,
        cache: Tensors,
        metadata: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Sequence by sequence, everything from the cache."""
        for step in metadata.sequences:
            q_tHD = query["q"][step.rows]
            wide = torch.float64 if torch.float64 in (q_tHD.dtype, cache["k"].dtype) else torch.float32
            keys_nKD = self.read(layer, "k", cache, metadata, step, wide)
            values_nKV = self.read(layer, "v", cache, metadata, step, wide)
            result, total = attend_dense(layer, q_tHD.to(wide), keys_nKD, values_nKV, step)
            out[step.rows] = result.to(out.dtype)
            if lse is not None:
                lse[step.rows] = total.float()

    def read(
        self, layer: AttentionLayer, name: str, cache: Tensors, metadata: Step, step: SequenceStep, wide: torch.dtype
    ) -> torch.Tensor:
        """Keys or values [n, K, D] of a sequence, as numbers."""
        view = in_token_order(name, cache[name], metadata.layout)
        codes = take(view, step.slots_n, metadata.size)
        scale = None
        if f"{name}_scale" in cache:
            scales = in_token_order(f"{name}_scale", cache[f"{name}_scale"], metadata.layout)
            scale = take(scales, step.slots_n, metadata.size)
        return decode(layer, name, codes, scale, wide)
