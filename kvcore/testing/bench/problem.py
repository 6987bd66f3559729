"""One attention problem on one backend: plan, arena, tables, a batch, random data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvcore.attention.backend import AttentionGroup, AttentionLayer
from kvcore.attention.query import AttentionQuery
from kvcore.memory.arena import Arena
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.dtypes import torch_dtype
from kvcore.memory.views import field_tensors
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.dtypes import round_up
from kvcore.spec.retention import Full
from kvcore.testing.cases.planning import Target


@dataclass(frozen=True)
class Shape:
    """What is measured.

    Attributes:
        batch: Sequences.
        context: Tokens of each after the step.
        query: Tokens of each in the step: 1 is a decode, `context` a whole prefill.
        heads, kv_heads, head_dim: Geometry.
        dtype: Of queries, keys and values.
        cache_dtype: Of the cache; "" is the same.
        quant: Granularity of its scales.
    """

    batch: int
    context: int
    query: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    cache_dtype: str = ""
    quant: str | None = None

    @property
    def stored(self) -> str:
        """Dtype of the cache."""
        return self.cache_dtype or self.dtype

    @property
    def phase(self) -> str:
        """decode, prefill or chunked."""
        return "decode" if self.query == 1 else "prefill" if self.query == self.context else "chunked"

    def content(self) -> KVHeads:
        """What the cache stores."""
        quant = None if self.quant is None else Quant(self.quant)  # type: ignore[arg-type]
        return KVHeads(self.kv_heads, self.head_dim, dtype=self.stored, quant=quant)

    def attention_query(self) -> AttentionQuery:
        """What a backend is asked."""
        return AttentionQuery(
            "kv", self.dtype, self.stored, self.heads, self.kv_heads, self.head_dim, self.head_dim, quant=self.quant
        )

    def read_bytes(self) -> int:
        """Bytes of keys and values that a decode step must read once."""
        return self.batch * self.context * self.content().bytes_per_token

    def written_bytes(self) -> int:
        """Bytes that a write reads and stores."""
        width = torch_dtype(self.dtype).itemsize * 2 * self.kv_heads * self.head_dim
        return self.batch * self.query * (width + self.content().bytes_per_token)

    def flops(self) -> float:
        """Multiplications and additions of causal attention."""
        keys = self.query * (self.context - (self.query - 1) / 2)
        return 4.0 * self.batch * self.heads * keys * self.head_dim


class Problem:
    """A shape made real; `write` and `attend` run one step of one layer.

    Args:
        shape: The shape.
        target: Backend, options and device.
        block_size: Tokens of a block, raised to what the backend takes.
    """

    def __init__(self, shape: Shape, target: Target, block_size: int = 16) -> None:
        self.shape, self.device = shape, target.device
        spec, cache = KVCacheSpec(shape.content(), Full()), CacheId(0)
        options = tuple(target.spec.layouts(spec, target.facts, target.options))
        size = _block_size(options[0].kernel_blocks, block_size)
        each = -(-shape.context // size)
        offer = LayoutOffer(target.spec.name, options[:1], target.spec.max_offset_bits)
        limits = Limits(shape.context, shape.query * shape.batch, shape.batch)
        budget = Budget(num_blocks=each * shape.batch + 2)
        config = plan({cache: spec}, {cache: offer}, budget, limits, block_size=size).configs[0]
        self.group = config.kv_cache_groups[0]
        arena = Arena(config.total_bytes, self.device)
        self.cache: Mapping[str, torch.Tensor] = field_tensors(arena, config, cache)
        self._fill()
        tables = BlockTables(config, shape.batch, shape.context, self.device)
        order = (torch.randperm(each * shape.batch, generator=torch.Generator().manual_seed(0)) + 1).tolist()
        for row in range(shape.batch):
            ids = order[row * each : (row + 1) * each]
            tables.apply(0, row, SimpleNamespace(drop_front=0, keep=0, ids=ids))
        builder = BatchBuilder(config, shape.batch, shape.batch * shape.query, self.device)
        computed = [shape.context - shape.query] * shape.batch
        self.batch = builder.build(range(shape.batch), [shape.query] * shape.batch, computed, tables)
        self._keep = (arena, builder, tables)
        self.layer = AttentionLayer(cache, shape.attention_query())
        self.backend = target.spec.create(self.device, target.options)
        self.attention_group = AttentionGroup(0, self.layer.query, (self.layer,), self.group.layout)
        tokens, dtype = shape.batch * shape.query, torch_dtype(shape.dtype)
        self.q = torch.randn(tokens, shape.heads, shape.head_dim, device=self.device).to(dtype)
        self.fresh = {
            n: torch.randn(tokens, shape.kv_heads, shape.head_dim, device=self.device).to(dtype) for n in ("k", "v")
        }
        self.out = torch.empty_like(self.q)
        self.metadata: Any = self.backend.prepare(self.batch, self.attention_group)

    def attend(self) -> None:
        """Attention of the step."""
        self.backend.attend(self.layer, {"q": self.q}, self.cache, self.metadata, self.out)

    def write(self) -> None:
        """The step's tokens into the cache."""
        self.backend.write(self.layer, self.fresh, self.cache, self.metadata)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random contiguous keys and values [batch, K, context, D], for peers that page nothing."""
        s = self.shape
        size = (s.batch, s.kv_heads, s.context, s.head_dim)
        return tuple(  # type: ignore[return-value]
            torch.randn(size, device=self.device).to(torch_dtype(s.dtype)) for _ in range(2)
        )

    def _fill(self) -> None:
        for name, field in self.cache.items():
            if field.dtype == torch.int8:
                field.random_(-127, 128)
            elif name.endswith("_scale"):
                field.uniform_(0.005, 0.02)
            elif field.itemsize == 1:
                # Codes of small numbers, whatever the kind of fp8.
                field.view(torch.uint8).random_(0, 64)
            else:
                field.normal_()


def _block_size(blocks: Any, wanted: int) -> int:
    for size in (wanted, *(round_up(wanted, n) for n in (16, 32, 64, 128, 256, 512))):
        if blocks.fit(size) is not None:
            return int(size)
    return int(wanted)
