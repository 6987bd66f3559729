"""A `ForwardContext` that is obviously right: keys and values in lists, attention in float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcore.attention.query import AttentionQuery
from kvcore.models.forward_context import ForwardContext
from kvcore.spec.cache_spec import CacheId


class DenseContext(ForwardContext):
    """Keeps every sequence's keys and values; `lengths` says how the flattened step is cut.

    Args:
        queries: The declared attention of each cache; edit a copy to see whether a fact matters.
        zero: Answer with zeros, to see whether attention matters at all.
        shared: Caches that read another's keys and values and store none.
    """

    def __init__(
        self,
        queries: dict[CacheId, AttentionQuery],
        *,
        zero: bool = False,
        shared: dict[CacheId, CacheId] | None = None,
    ) -> None:
        self.queries = queries
        self.shared = shared or {}
        self.zero = zero
        self.keys: dict[tuple[CacheId, int], torch.Tensor] = {}
        self.values: dict[tuple[CacheId, int], torch.Tensor] = {}
        self.lengths: list[tuple[int, int]] = []

    def step(self, lengths: list[tuple[int, int]]) -> DenseContext:
        """Announce the next step: (sequence, tokens) in the order of the flattened batch."""
        self.lengths = lengths
        return self

    def attend(self, cache_id, query_THD, key_TKD, value_TKDv, *, sinks=None):
        out, start = [], 0
        for sequence, count in self.lengths:
            rows = slice(start, start + count)
            start += count
            where = (self.shared.get(cache_id, cache_id), sequence)
            stores = () if cache_id in self.shared else ((self.keys, key_TKD), (self.values, value_TKDv))
            for store, new in stores:
                old = store.get(where)
                store[where] = new[rows].clone() if old is None else torch.cat([old, new[rows]])
            out.append(attention(self.queries[cache_id], query_THD[rows], self.keys[where], self.values[where], sinks))
        result = torch.cat(out).to(query_THD.dtype)
        return torch.zeros_like(result) if self.zero else result


def attention(
    query: AttentionQuery,
    query_THD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKDv: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention of the last T of N tokens, row by row from the definition."""
    group = query.num_heads // query.num_kv_heads
    key_NHD = key_NKD.double().repeat_interleave(group, dim=1)
    value_NHDv = value_NKDv.double().repeat_interleave(group, dim=1)
    tokens, total = len(query_THD), len(key_NHD)
    i = torch.arange(total - tokens, total)[:, None]
    j = torch.arange(total)[None, :]
    seen = j <= i if query.mask.causal else torch.ones(tokens, total, dtype=torch.bool)
    if query.mask.window is not None:
        seen = seen & (j > i - query.mask.window)
    if query.mask.chunk is not None:
        seen = seen & (j // query.mask.chunk == i // query.mask.chunk)
    score_HTN = torch.einsum("thd,nhd->htn", query_THD.double(), key_NHD) * query.softmax_scale
    if query.softcap is not None:
        score_HTN = query.softcap * torch.tanh(score_HTN / query.softcap)
    score_HTN = score_HTN.masked_fill(~seen, float("-inf"))
    if query.sinks:
        column = sinks.double()[:, None, None].expand(-1, tokens, 1)
        score_HTN = torch.cat([score_HTN, column], dim=-1)
    weight_HTN = torch.softmax(score_HTN, dim=-1)[:, :, :total]
    return torch.einsum("htn,nhd->thd", weight_HTN, value_NHDv)


def changed(queries: dict[CacheId, AttentionQuery], **facts) -> dict[CacheId, AttentionQuery]:
    """Copies of the queries with some facts replaced."""
    return {c: replace(q, **facts) for c, q in queries.items()}
