"""Copy and zero blocks through strided byte views: Triton on a GPU, a torch twin elsewhere."""

from __future__ import annotations

import torch

from kvcore.memory.kernels.launch import launcher_for

# Bytes of a temporary of the torch twin: enough to amortise a call, little beside a cache.
TEMPORARY_BYTES = 64 << 20
# Elements that one program moves at a time.
BLOCK = 1024
# Element types that bytes may be moved as, widest first.
_UNITS = (torch.int64, torch.int32, torch.int16, torch.int8)


def copy_blocks(
    source_LFNB: torch.Tensor,
    target_LFNB: torch.Tensor,
    from_n: torch.Tensor,
    to_n: torch.Tensor,
    *,
    overlap: bool = True,
    interpret: bool = False,
) -> None:
    """Copy blocks as if all were read before any is written; the two views may lie on two devices.

    Args:
        source_LFNB: int8 [layers, runs, blocks, bytes].
        target_LFNB: int8 of the same layers, runs and bytes; its blocks may be of another number.
        from_n: int64 [n] blocks of the source, on its device.
        to_n: int64 [n] distinct blocks of the target, on its device.
        overlap: A block may be both read and written; False spares a temporary.
        interpret: Run the Triton kernel in its interpreter.
    """
    launcher = launcher_for(source_LFNB.device, interpret)
    if launcher is None or source_LFNB.device != target_LFNB.device:
        _copy_in_torch(source_LFNB, target_LFNB, from_n, to_n)
        return
    from kvcore.memory.kernels.triton_kernels import copy_pieces

    layers, runs, _, width = source_LFNB.shape
    if overlap:
        # Programs run in any order: where a block is read and written, the sources must be safe first.
        held = torch.empty((layers, runs, len(from_n), width), dtype=torch.int8, device=source_LFNB.device)
        rows = torch.arange(len(from_n), device=from_n.device)
        copy_blocks(source_LFNB, held, from_n, rows, overlap=False, interpret=interpret)
        source_LFNB, from_n = held, rows
    source, target = _widest(source_LFNB, target_LFNB)
    args = {
        "source_ptr": source,
        "target_ptr": target,
        "from_ptr": from_n,
        "to_ptr": to_n,
        "source_layer": source.stride(0),
        "source_run": source.stride(1),
        "source_block": source.stride(2),
        "target_layer": target.stride(0),
        "target_run": target.stride(1),
        "target_block": target.stride(2),
        "runs": runs,
        "width": source.shape[3],
        "BLOCK": BLOCK,
    }
    launcher(copy_pieces, (len(from_n), layers * runs), args, num_warps=4)


def zero_blocks(view_LFNB: torch.Tensor, blocks_n: torch.Tensor, *, interpret: bool = False) -> None:
    """Write zeros to every byte of some blocks, padding included.

    Args:
        view_LFNB: int8 [layers, runs, blocks, bytes].
        blocks_n: int64 [n] blocks, on its device.
        interpret: Run the Triton kernel in its interpreter.
    """
    launcher = launcher_for(view_LFNB.device, interpret)
    if launcher is None:
        view_LFNB.index_fill_(2, blocks_n, 0)
        return
    from kvcore.memory.kernels.triton_kernels import zero_pieces

    (target,) = _widest(view_LFNB)
    layers, runs, _, width = target.shape
    args = {
        "target_ptr": target,
        "blocks_ptr": blocks_n,
        "target_layer": target.stride(0),
        "target_run": target.stride(1),
        "target_block": target.stride(2),
        "runs": runs,
        "width": width,
        "BLOCK": BLOCK,
    }
    launcher(zero_pieces, (len(blocks_n), layers * runs), args, num_warps=4)


def _widest(*views_LFNB: torch.Tensor) -> list[torch.Tensor]:
    """The views in the widest unit that every address, stride and length is a multiple of."""
    for unit in _UNITS:
        size = unit.itemsize
        if all(
            not any(n % size for n in (v.data_ptr(), v.storage_offset(), v.shape[3], *v.stride()[:3]))
            for v in views_LFNB
        ):
            return [
                torch.as_strided(
                    v.as_strided((_span(v),), (1,)).view(unit),
                    (*v.shape[:3], v.shape[3] // size),
                    (*(s // size for s in v.stride()[:3]), 1),
                )
                for v in views_LFNB
            ]
    return list(views_LFNB)


def _span(view: torch.Tensor) -> int:
    """Bytes from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))


def _copy_in_torch(
    source_LFNB: torch.Tensor, target_LFNB: torch.Tensor, from_n: torch.Tensor, to_n: torch.Tensor
) -> None:
    layers, runs, _, width = source_LFNB.shape
    step = max(1, TEMPORARY_BYTES // max(1, runs * width * len(from_n)))
    for start in range(0, layers, step):
        piece = source_LFNB[start : start + step].index_select(2, from_n)
        target_LFNB[start : start + step].index_copy_(2, to_n, piece.to(target_LFNB.device))
