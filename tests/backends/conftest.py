"""A paged scene for backend tests, and the dense float64 oracle that it is judged by.

The scene shares no index arithmetic with the code under test: tables are plain lists, tokens are placed
one by one, and the oracle knows nothing of blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvcore_torch.declaration import TorchBackendSpec, TorchOptions
from support.poison import fill_poison

from kvcore.attention.backend import AttentionGroup, AttentionLayer
from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.query import AttentionQuery, Mask
from kvcore.memory.arena import Arena
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.views import field_tensors
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.retention import Full

CPU = DeviceFacts("cpu")
CACHE = CacheId(0)


def oracle(query, q_THD, keys, values, lengths, scheduled, slopes=None, sinks=None):
    """Outputs float64 [T, H, Dv] and log-sum-exps [T, H] by the definition, query by query."""
    outs, lses, row = [], [], 0
    mask = query.mask
    for k, v, length, count in zip(keys, values, lengths, scheduled, strict=True):
        for t in range(count):
            i = length - count + t
            seen = [
                j
                for j in range(len(k))
                if (not mask.causal or j <= i)
                and (mask.window is None or (i - mask.window < j and (mask.causal or j < i + mask.window)))
                and (mask.chunk is None or j // mask.chunk == i // mask.chunk)
            ]
            for h in range(query.num_heads):
                g = h // query.group_size
                if not seen:
                    outs.append(np.zeros(query.head_dim_v))
                    lses.append(-np.inf)
                    continue
                s = k[seen, g] @ q_THD[row, h] * query.softmax_scale
                if query.softcap is not None:
                    s = query.softcap * np.tanh(s / query.softcap)
                if slopes is not None:
                    s = s - slopes[h] * np.abs(i - np.array(seen))
                logits = s if sinks is None else np.append(s, sinks[h])
                lse = np.logaddexp.reduce(logits)
                outs.append(np.exp(s - lse) @ v[seen, g])
                lses.append(lse)
            row += 1
    shape = (row, query.num_heads)
    return np.array(outs).reshape(*shape, query.head_dim_v), np.array(lses).reshape(shape)


@dataclass
class Scene:
    """One layer, its cache full of poison, and sequences in the middle of their life."""

    query: AttentionQuery
    block_size: int = 8
    kernel: int | None = None
    layout: str = "hnd"
    lengths: tuple[int, ...] = (5, 17, 30)
    scheduled: tuple[int, ...] = (1, 1, 7)
    first_blocks: tuple[int, ...] = (0, 0, 0)
    spread: float = 1.0
    seed: int = 0
    poison: bool = True
    parts: SimpleNamespace = field(init=False)

    def __post_init__(self):
        q, rng = self.query, np.random.default_rng(self.seed)
        content = KVHeads(q.num_kv_heads, q.head_dim, q.head_dim_v, dtype=q.cache_dtype)
        spec, options = KVCacheSpec(content, Full()), TorchOptions(self.layout, self.kernel)
        offer = LayoutOffer("torch", tuple(TorchBackendSpec.layouts(spec, CPU, options)), 63)
        self.config = plan(
            {CACHE: spec}, {CACHE: offer}, Budget(num_blocks=64), Limits(256, 256, 16), block_size=self.block_size
        ).configs[0]
        self.arena = Arena(self.config.total_bytes)
        self.cache = field_tensors(self.arena, self.config, CACHE)
        if self.poison:
            for tensor in self.cache.values():
                fill_poison(tensor, q.cache_dtype)
        total, dtype = sum(self.scheduled), getattr(torch, q.dtype)

        def draw(*shape):
            # Rounded to the dtype first, so that the oracle sees the same numbers.
            return torch.tensor(rng.normal(size=shape) * self.spread).to(dtype)

        self.q = draw(total, q.num_heads, q.head_dim)
        self.k = [draw(n, q.num_kv_heads, q.head_dim) for n in self.lengths]
        self.v = [draw(n, q.num_kv_heads, q.head_dim_v) for n in self.lengths]
        self.slopes = torch.tensor(rng.uniform(0.1, 0.5, q.num_heads)) if q.alibi else None
        self.sinks = torch.tensor(rng.normal(size=q.num_heads)) if q.sinks else None
        self.layer = AttentionLayer(
            CACHE,
            q,
            None if self.slopes is None else self.slopes.float(),
            None if self.sinks is None else self.sinks.float(),
        )
        self.tables = self._tables()
        self._place_past()

    def _tables(self):
        ids = list(range(1, 64))
        random.Random(self.seed).shuffle(ids)
        self.held, tables = [], BlockTables(self.config, 16, 256, "cpu")
        for row, (n, first) in enumerate(zip(self.lengths, self.first_blocks, strict=True)):
            mine = [ids.pop() for _ in range(first, -(-n // self.block_size))]
            self.held.append({first + i: b for i, b in enumerate(mine)})
            tables.apply(0, row, SimpleNamespace(drop_front=first, keep=0, ids=mine))
        return tables

    def slot(self, field, s, j):
        """The elements [K, D] of token j of sequence s, found by counting tokens."""
        group = self.config.kv_cache_groups[0]
        block, offset = self.held[s][j // self.block_size], j % self.block_size
        kernel = block * group.ratio + offset // group.kernel_block_size
        offset %= group.kernel_block_size
        return self.cache[field][kernel, offset] if self.layout == "kv_first" else self.cache[field][kernel, :, offset]

    def _place_past(self):
        for s, (n, count) in enumerate(zip(self.lengths, self.scheduled, strict=True)):
            for j in range(self.first_blocks[s] * self.block_size, n - count):
                self.slot("k", s, j)[:] = self.k[s][j]
                self.slot("v", s, j)[:] = self.v[s][j]

    def batch(self):
        builder = BatchBuilder(self.config, 16, 256, "cpu")
        computed = [n - c for n, c in zip(self.lengths, self.scheduled, strict=True)]
        return builder.build(list(range(len(self.lengths))), self.scheduled, computed, self.tables)

    def run(self, backend=None, want_lse=None):
        """(outputs, log-sum-exps or None) of the backend."""
        backend = backend or TorchBackendSpec.create("cpu", TorchOptions())
        batch = self.batch()
        group = AttentionGroup(0, self.query, (self.layer,), self.config.kv_cache_groups[0].layout)
        metadata = backend.prepare(batch, group)
        fresh = {
            name: torch.cat([x[n - c :] for x, n, c in zip(all_, self.lengths, self.scheduled, strict=True)])
            for name, all_ in (("k", self.k), ("v", self.v))
        }
        backend.write(self.layer, fresh, self.cache, metadata)
        total = sum(self.scheduled)
        out = torch.full((total, self.query.num_heads, self.query.head_dim_v), torch.nan, dtype=self.q.dtype)
        want = self.query.lse if want_lse is None else want_lse
        lse = torch.full((total, self.query.num_heads), torch.nan) if want else None
        backend.attend(self.layer, {"q": self.q}, self.cache, metadata, out, lse)
        return out, lse

    def expected(self):
        """The oracle's answer, from the numbers that the cache can hold."""
        cached = getattr(torch, self.query.cache_dtype)
        keys = [k.to(cached).double().numpy() for k in self.k]
        values = [v.to(cached).double().numpy() for v in self.v]
        slopes = None if self.slopes is None else self.slopes.float().double().numpy()
        sinks = None if self.sinks is None else self.sinks.float().double().numpy()
        return oracle(self.query, self.q.double().numpy(), keys, values, self.lengths, self.scheduled, slopes, sinks)


def facts(**changes):
    """An `AttentionQuery` of small size; mask facts may be given by name."""
    mask = Mask(**{n: changes.pop(n) for n in ("causal", "window", "chunk") if n in changes})
    base = {
        "content": "kv",
        "dtype": "float32",
        "cache_dtype": "float32",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "head_dim_v": 8,
        "mask": mask,
    }
    return AttentionQuery(**(base | changes))


@pytest.fixture
def scene():
    """Makes a `Scene` from facts and scene settings."""

    def make(query=None, **settings):
        return Scene(facts(**(query or {})), **settings)

    return make
