"""What the kernels compute, one sequence at a time, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore_flash_attn.emulation.checks import check


@dataclass(frozen=True)
class Call:
    """What all sequences of a call share, as the C++ settles it before a kernel is chosen.

    Attributes:
        scale, softcap: As given.
        left, right: Keys visible beside the query; -1 for no bound.
    """

    scale: float
    softcap: float
    left: int
    right: int

    @property
    def causal_kernel(self) -> bool:
        """Whether the causal kernel runs, not the windowed one."""
        return self.left < 0 and self.right == 0


def settle(
    scale: float, softcap: float, causal: bool, left: int, right: int, *, one_query: bool, alibi: bool, width: int
) -> Call:
    """The bounds that reach the kernel.

    Args:
        scale: As given.
        softcap: As given.
        causal: As given.
        left: As given.
        right: As given.
        one_query: No sequence has more than one.
        alibi: Whether there are slopes.
        width: Length of the longest possible sequence; bounds that reach further are dropped.
    """
    if one_query and not alibi:
        causal = False
    if causal:
        right = 0
    return Call(scale, softcap, -1 if left >= width else left, -1 if right >= width else right)


def attend(
    q_QHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, call: Call, slopes_H: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [Q, H, D] in the queries' dtype and log-sum-exps float32 [H, Q]; +inf for rows without keys."""
    queries, heads, dim = q_QHD.shape
    keys, kv_heads, _ = k_NKD.shape
    if keys == 0:
        return torch.zeros_like(q_QHD), torch.full((heads, queries), torch.inf)
    rows = q_QHD.float().transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = (rows @ k_NKD.float().permute(1, 2, 0)).view(heads, queries, keys) * call.scale
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None, :]
    if slopes_H is not None:
        # The causal kernel adds the same vector to every row; the softmax cannot tell, its sum can.
        bias = j if call.causal_kernel else -(i - j).abs()
        scores = scores + slopes_H[:, None, None] * bias
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if call.right >= 0:
        hidden |= j > i + call.right
    if call.left >= 0:
        hidden |= j < i - call.left
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = weights.view(kv_heads, -1, keys) @ v_NKD.float().transpose(0, 1)
    out = out.view(heads, queries, -1).transpose(0, 1).to(q_QHD.dtype)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def pages(cache: torch.Tensor, row: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` tokens [count, K, D] of a sequence whose pages `row` names."""
    size = cache.shape[1]
    needed = -(-count // size)
    check(needed <= len(row), "emulation: the block table is too narrow; the kernel would read beyond it")
    ids = row[:needed].long()
    inside = bool(((ids >= 0) & (ids < len(cache))).all())
    check(inside, "emulation: the block table names a page that is not there")
    return cache[ids].flatten(0, 1)[:count]
