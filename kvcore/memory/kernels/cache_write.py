"""The plain cache write: tokens into their slots, for any layout whose axes are not split (torch twin)."""

from __future__ import annotations

import torch


def write_tokens(
    field_NP: torch.Tensor, values_T: torch.Tensor, blocks_T: torch.Tensor, offsets_T: torch.Tensor
) -> None:
    """Store each token at (block, offset), converted to the cache's dtype.

    Args:
        field_NP: [N, P, *axes] a field in logical order, from `memory.views.logical_view`.
        values_T: [T, *axes].
        blocks_T: int64 [T] blocks.
        offsets_T: int64 [T] offsets in the block; no (block, offset) appears twice.
    """
    field_NP[blocks_T, offsets_T] = values_T.to(field_NP.dtype)
