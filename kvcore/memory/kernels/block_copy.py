"""Copy and zero blocks through strided byte views (torch twin)."""

from __future__ import annotations

import torch

# Bytes of a temporary: enough to amortise a call, little beside a cache.
TEMPORARY_BYTES = 64 << 20


def copy_blocks(
    source_LFNB: torch.Tensor, target_LFNB: torch.Tensor, from_n: torch.Tensor, to_n: torch.Tensor
) -> None:
    """Copy blocks as if all were read before any is written; the two views may lie on two devices.

    Args:
        source_LFNB: int8 [layers, runs, blocks, bytes].
        target_LFNB: int8 of the same layers, runs and bytes; its blocks may be of another number.
        from_n: int64 [n] blocks of the source, on its device.
        to_n: int64 [n] distinct blocks of the target, on its device.
    """
    layers, runs, _, width = source_LFNB.shape
    step = max(1, TEMPORARY_BYTES // max(1, runs * width * len(from_n)))
    for start in range(0, layers, step):
        piece = source_LFNB[start : start + step].index_select(2, from_n)
        target_LFNB[start : start + step].index_copy_(2, to_n, piece.to(target_LFNB.device))


def zero_blocks(view_LFNB: torch.Tensor, blocks_n: torch.Tensor) -> None:
    """Write zeros to every byte of some blocks, padding included."""
    view_LFNB.index_fill_(2, blocks_n, 0)
