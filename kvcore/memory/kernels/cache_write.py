"""The plain cache write: tokens into their slots, for any layout whose axes are not split."""

from __future__ import annotations

import torch

from kvcore.errors import LayoutError
from kvcore.memory.kernels.launch import launcher_for

BLOCK = 1024


def write_tokens(
    field_NP: torch.Tensor, values_T: torch.Tensor, blocks_T: torch.Tensor, offsets_T: torch.Tensor
) -> None:
    """Store each token at (block, offset), converted to the cache's dtype (torch, on any device).

    Args:
        field_NP: [N, P, *axes] a field in logical order, from `memory.views.logical_view`.
        values_T: [T, *axes].
        blocks_T: int64 [T] blocks.
        offsets_T: int64 [T] offsets in the block; no (block, offset) appears twice.
    """
    field_NP[blocks_T, offsets_T] = values_T.to(field_NP.dtype)


def write_slots(
    field_NP: torch.Tensor, values_T: torch.Tensor, slots_T: torch.Tensor, *, interpret: bool = False
) -> None:
    """Store each token into its slot, converted to the cache's dtype; -1 writes nothing.

    On a GPU this is one Triton kernel that asks nothing of the host; elsewhere it is its torch twin.

    Args:
        field_NP: [N, P, *axes] a field in logical order (block, token, then one or two axes), any strides.
        values_T: [T, *axes], any strides.
        slots_T: int64 [T] ``block * P + offset``, or -1; no slot appears twice.
        interpret: Run the Triton kernel in its interpreter.

    Raises:
        LayoutError: The field has more than two axes beside block and token.
    """
    launcher = launcher_for(field_NP.device, interpret)
    size = field_NP.shape[1]
    if launcher is None:
        kept = (slots_T >= 0).nonzero().squeeze(1)
        slots = slots_T[kept]
        blocks, offsets = slots.div(size, rounding_mode="floor"), slots.remainder(size)
        field, values = (_as_bytes(t) for t in (field_NP, values_T.to(field_NP.dtype)))
        write_tokens(field, values[kept], blocks, offsets)
        return
    if not 3 <= field_NP.dim() <= 4:
        raise LayoutError("the plain write takes fields of one or two axes", field="field", got=tuple(field_NP.shape))
    from kvcore.memory.kernels.triton_kernels import write_slots as kernel

    # Bytes move as they are; an fp8 pointer would only make them a type that not every target has.
    field, values = (_as_bytes(t) for t in (field_NP, values_T.to(field_NP.dtype)))
    if field.dim() == 3:
        field, values = field.unsqueeze(2), values.unsqueeze(1)
    inner = field.shape[3]
    args = {
        "field_ptr": field,
        "values_ptr": values,
        "slots_ptr": slots_T,
        "field_block": field.stride(0),
        "field_token": field.stride(1),
        "field_outer": field.stride(2),
        "field_inner": field.stride(3),
        "values_token": values.stride(0),
        "values_outer": values.stride(1),
        "values_inner": values.stride(2),
        "block_size": size,
        "inner": inner,
        "total": field.shape[2] * inner,
        "BLOCK": BLOCK,
    }
    launcher(kernel, (len(slots_T),), args, num_warps=4)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes: torch indexes those and not fp8. Other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
