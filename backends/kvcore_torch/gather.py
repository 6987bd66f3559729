"""One sequence's keys (or values) out of the blocks of a cache."""

from __future__ import annotations

import torch

from kvcore_torch.quant import as_bytes
from kvcore_torch.tile_schedule import Sequence


def gather(field: torch.Tensor, sequence: Sequence, dtype: torch.dtype, *, head_first: bool) -> torch.Tensor:
    """What the sequence's queries can see, in its order.

    Args:
        field: [N, K, P, D] or [N, P, K, D], any block stride.
        sequence: Its blocks, and which of their tokens are wanted.
        dtype: Type to compute in.
        head_first: Which of the two `field` is.

    Returns:
        [K, tokens, D], for `torch.bmm`: the last axis is contiguous.
    """
    blocks_n, span, stored = sequence.blocks, sequence.span, field.dtype
    field = as_bytes(field)
    if head_first:
        _, heads, size, dim = field.shape
        joined = _heads_first(field, sequence).view(heads, len(blocks_n) * size, dim)
        return joined.view(stored)[:, span].to(dtype)
    _, size, heads, dim = field.shape
    picked = field.index_select(0, blocks_n).view(len(blocks_n) * size, heads, dim)
    return picked.view(stored)[span].to(dtype).transpose(0, 1)


def _heads_first(field_NKPD: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """[K, n, P, D] contiguous, in one pass over the bytes where the strides allow it."""
    count, heads, size, dim = field_NKPD.shape
    block, head, token, last = field_NKPD.stride()
    if head != size * dim or token != dim or last != 1 or block % head:
        return field_NKPD.index_select(0, sequence.blocks).transpose(0, 1).contiguous()
    # Every head of every block is one row of a matrix whose rows are `head` elements apart.
    pitch = block // head
    rows = field_NKPD.as_strided(((count - 1) * pitch + heads, head), (head, 1))
    return rows.index_select(0, sequence.head_rows(pitch, heads))
