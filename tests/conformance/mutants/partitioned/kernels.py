"""The two kernels: one partition of keys, and the reduction over all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore.attention.query import AttentionQuery

from .step import Call


@dataclass
class HeadFacts:
    """What a layer has for each query head.

    Attributes:
        slopes_H, sinks_H: float32, or None.
    """

    slopes_H: torch.Tensor | None
    sinks_H: torch.Tensor | None


@dataclass
class Partial:
    """What one partition gives: peaks, sums of weights and weighted values."""

    peak_SHQ: torch.Tensor
    total_SHQ: torch.Tensor
    out_SHQV: torch.Tensor


def one_partition(
    query: AttentionQuery,
    facts: HeadFacts,
    call: Call,
    q_SHQD: torch.Tensor,
    k_SKpD: torch.Tensor,
    v_SKpV: torch.Tensor,
    first_S: torch.Tensor,
) -> Partial:
    """Softmax over the keys of one partition.

    Args:
        query: The facts of the layer.
        facts: Its numbers a head.
        call: Positions and lengths.
        q_SHQD: float32 queries.
        k_SKpD: float32 keys of the partition.
        v_SKpV: Its values.
        first_S: Position of its first key.
    """
    sequences, heads, queries, dim = q_SHQD.shape
    kv_heads, keys = k_SKpD.shape[1], k_SKpD.shape[2]
    grouped = q_SHQD.reshape(sequences, kv_heads, -1, dim)
    scores = torch.matmul(grouped, k_SKpD.transpose(2, 3)) * query.softmax_scale
    scores = scores.view(sequences, heads, queries, keys)
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    key_Sp = first_S[:, None] + torch.arange(keys)
    i = call.positions_SQ[:, :, None]
    j = key_Sp[:, None, :]
    if facts.slopes_H is not None:
        distance = (i - j).abs()[:, None]
        scores = scores - facts.slopes_H[:, None, None] * distance
    seen = j < call.length_S[:, None, None]
    if query.mask.causal:
        seen = seen & (j <= i)
    if query.mask.window is not None:
        seen = seen & (j > i - query.mask.window)
        seen = seen & (j < i + query.mask.window)
    if query.mask.chunk is not None:
        seen = seen & (j // query.mask.chunk == i // query.mask.chunk)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    peak = scores.amax(-1)
    floor = peak.masked_fill(peak == -torch.inf, 0)
    weights = torch.exp(scores - floor[..., None])
    total = weights.sum(-1)
    grouped = weights.reshape(sequences, kv_heads, -1, keys)
    out = torch.matmul(grouped, v_SKpV)
    return Partial(peak, total, out.view(sequences, heads, queries, -1))


def reduce(facts: HeadFacts, parts: list[Partial]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [S, H, Q, Dv] and log-sum-exps [S, H, Q] over all partitions; the sink is counted once."""
    peaks = torch.stack([p.peak_SHQ for p in parts])
    peak = peaks.amax(0)
    blind = peak == -torch.inf
    if facts.sinks_H is not None:
        peak = torch.maximum(peak, facts.sinks_H[:, None])
    peak = peak.masked_fill(peak == -torch.inf, 0)
    shares = torch.exp(peaks - peak)
    totals = torch.stack([p.total_SHQ for p in parts])
    total = (shares * totals).sum(0)
    if facts.sinks_H is not None:
        total = total + torch.exp(facts.sinks_H[:, None] - peak)
    outs = torch.stack([p.out_SHQV for p in parts])
    out = (shares[..., None] * outs).sum(0)
    out = out / total.clamp(min=1e-30)[..., None]
    lse = peak + torch.log(total)
    return out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)
