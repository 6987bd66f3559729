"""What the kernels compute, one sequence at a time, in float32; log-sum-exps to base 2, as theirs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kvcore_flashinfer.emulation.checks import check

HND = 1
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Variant(NamedTuple):
    """What a compiled variant and its arguments fix.

    Attributes:
        scale: Softmax scale, the keys' scale in it.
        softcap: 0 for none.
        window_left: -1 for none.
        causal: Whether later keys are hidden.
    """

    scale: float
    softcap: float
    window_left: int
    causal: bool


class Pages(NamedTuple):
    """Pages and where each sequence's are."""

    k: torch.Tensor
    v: torch.Tensor
    indptr: list[int]
    indices: torch.Tensor
    last: list[int]
    layout: int

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return int(self.k.shape[2 if self.layout == HND else 1])

    def length(self, b: int) -> int:
        """Keys of a sequence; none where it has no page, whatever its last page is said to hold."""
        pages = self.indptr[b + 1] - self.indptr[b]
        if pages == 0:
            return 0
        check(1 <= self.last[b] <= self.size, "emulation: last_page_len is not between 1 and the page size")
        return (pages - 1) * self.size + self.last[b]

    def tokens(self, cache: torch.Tensor, b: int) -> torch.Tensor:
        """float32 [n, K, D]."""
        ids = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
        inside = bool(((ids >= 0) & (ids < len(cache))).all())
        check(inside, "emulation: a page index is out of range; the kernel would read beyond the cache")
        picked = cache.view(torch.uint8)[ids].view(cache.dtype) if cache.dtype in _FP8 else cache[ids]
        if self.layout == HND:
            picked = picked.transpose(1, 2)
        return picked.float().flatten(0, 1)[: self.length(b)]


def attend(q_QHD: torch.Tensor, pages: Pages, b: int, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs float32 [Q, H, D] and log-sum-exps to base 2 [Q, H] of one sequence."""
    queries, heads, dim = q_QHD.shape
    count = pages.length(b)
    if count == 0:
        return torch.zeros(queries, heads, dim), torch.full((queries, heads), -torch.inf)
    k_NKD, v_NKD = pages.tokens(pages.k, b), pages.tokens(pages.v, b)
    groups = k_NKD.shape[1]
    rows = q_QHD.float().transpose(0, 1).reshape(groups, -1, dim)
    scores = (rows @ k_NKD.permute(1, 2, 0)).view(heads, queries, count) * variant.scale
    if variant.softcap > 0:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    i = torch.arange(queries)[:, None] + count - queries
    j = torch.arange(count)[None, :]
    hidden = j > i if variant.causal else torch.zeros(queries, count, dtype=torch.bool)
    if variant.window_left >= 0:
        hidden = hidden | (j < i - variant.window_left)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = weights.view(groups, -1, count) @ v_NKD.transpose(0, 1)
    return out.view(heads, queries, -1).transpose(0, 1), (lse / math.log(2)).transpose(0, 1)
