"""What a token stores, and how long it stays: a content and a retention of our own. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kvcore.backend as kv


@dataclass(frozen=True)
class NormedKV(kv.KVHeads):
    """Keys of length 1 and, beside them, how long they were: asked for by `cache.content=normed_kv`."""

    kind = "normed_kv"

    @classmethod
    def instead_of(cls, content: kv.Content) -> kv.Content | None:
        if type(content) is not kv.KVHeads or content.quant is not None:
            return None
        return cls(content.num_kv_heads, content.head_dim, content.head_dim_v, content.dtype)

    def fields(self) -> tuple[kv.LogicalField, ...]:
        return (*super().fields(), kv.LogicalField("k_norm", (("head", self.num_kv_heads),), self.dtype))

    def encode(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        norm_nK = values["k"].norm(dim=-1)
        stored = {"k": values["k"] / norm_nK.clamp_min(1e-30)[..., None], "v": values["v"], "k_norm": norm_nK}
        return {name: tensor.to(kv.torch_dtype(self.dtype)) for name, tensor in stored.items()}

    def decode(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        wide = {name: tensor.double() for name, tensor in fields.items()}
        return {"k": wide["k"] * wide["k_norm"][..., None], "v": wide["v"]}


@dataclass(frozen=True)
class LazyWindow(kv.Retention):
    """A window that moves only every `step` tokens: asked for by `cache.retention=lazy_window`."""

    kind = "lazy_window"
    size: int
    step: int = 64

    @classmethod
    def instead_of(cls, retention: kv.Retention) -> kv.Retention | None:
        return cls(retention.size) if isinstance(retention, kv.Window) and not retention.keep_first else None

    def first_needed(self, position: int) -> int:
        return max(0, position - self.size + 1) // self.step * self.step

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        return self.blocks_for_step(tokens, 0, block_size)

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        live = self.size - 1 + self.step - 1 + scheduled
        return min(kv.ceil_div(tokens, block_size), kv.touched_blocks(live, block_size))

    def step_budget(self, scheduled: int, block_size: int, sequences: int = 1) -> int:
        return scheduled // block_size + min(scheduled, sequences)
