"""One sequence's keys (or values) out of the blocks of a cache."""

from __future__ import annotations

import torch


def gather(
    field: torch.Tensor, blocks_n: torch.Tensor, span: slice, dtype: torch.dtype, *, head_first: bool
) -> torch.Tensor:
    """The elements of some blocks in the order of the sequence.

    Args:
        field: [N, K, P, D] or [N, P, K, D], any block stride.
        blocks_n: int64 [n] blocks.
        span: Which of their ``n * P`` tokens are wanted.
        dtype: Type to compute in.
        head_first: Which of the two `field` is.

    Returns:
        [K, tokens, D], for `torch.bmm`: the last axis is contiguous.
    """
    if head_first:
        _, heads, size, dim = field.shape
        joined = _heads_first(field, blocks_n).view(heads, len(blocks_n) * size, dim)
        return joined[:, span].to(dtype)
    _, size, heads, dim = field.shape
    picked = field.index_select(0, blocks_n).view(len(blocks_n) * size, heads, dim)
    return picked[span].to(dtype).transpose(0, 1)


def _heads_first(field_NKPD: torch.Tensor, blocks_n: torch.Tensor) -> torch.Tensor:
    """[K, n, P, D] contiguous, in one pass over the bytes where the strides allow it."""
    count, heads, size, dim = field_NKPD.shape
    block, head, token, last = field_NKPD.stride()
    if head != size * dim or token != dim or last != 1 or block % head:
        return field_NKPD.index_select(0, blocks_n).transpose(0, 1).contiguous()
    # Every head of every block is one row of a matrix whose rows are `head` elements apart.
    pitch = block // head
    rows = field_NKPD.as_strided(((count - 1) * pitch + heads, head), (head, 1))
    each = torch.arange(heads, device=blocks_n.device)[:, None] + blocks_n * pitch
    return rows.index_select(0, each.view(-1)).view(heads, len(blocks_n), size, dim)
