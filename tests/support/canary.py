"""Canary bytes: proof that a write stayed inside the bytes it owns."""

from __future__ import annotations

import torch

from kvcore.memory.arena import Arena
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.cache_spec import CacheId

PATTERN = 0x5A


def paint(arena: Arena) -> None:
    """Write the canary to every byte of the arena."""
    arena.raw.fill_(PATTERN)


def changed(arena: Arena) -> torch.Tensor:
    """Bool [nbytes]: the bytes that are no canary any more."""
    return arena.raw != PATTERN


def owned(config: KVCacheConfig, cache: CacheId, blocks: list[int], nbytes: int) -> torch.Tensor:
    """Bool [nbytes]: the bytes that `blocks` own in `cache`, padding included."""
    mask = torch.zeros(nbytes, dtype=torch.bool)
    for block in blocks:
        for start, end in config.footprint(cache, block):
            mask[start:end] = True
    return mask


def slot_bytes(config: KVCacheConfig, cache: CacheId, name: str, slots: list[int], nbytes: int) -> torch.Tensor:
    """Bool [nbytes]: the bytes of one field that belong to `slots`, found index by index.

    Slow and plain on purpose: this is what views and kernels are checked against.
    """
    group = config.group_of(cache)
    view = next(v for v in config.field_views(cache) if v.name == name)
    axes = next(f.axes for f in group.layout.layout.fields if f.name == name)
    tokens = [i for i, axis in enumerate(axes) if axis.name == "token"]
    width = view.strides[-1]
    mask = torch.zeros(nbytes, dtype=torch.bool)
    for slot in slots:
        block, rest = divmod(slot, group.kernel_block_size)
        # A split token axis counts like the digits of the offset, outer part first.
        digits = {}
        for i in reversed(tokens):
            rest, digits[i] = divmod(rest, view.shape[1 + i])
        starts = [view.offset + block * view.strides[0]]
        for i, (size, stride) in enumerate(zip(view.shape[1:], view.strides[1:], strict=True)):
            steps = [digits[i]] if i in digits else range(size)
            starts = [start + step * stride for start in starts for step in steps]
        for start in starts:
            mask[start : start + width] = True
    return mask


def lies_in(arena: Arena, tensor: torch.Tensor) -> bool:
    """Whether every element of `tensor` lies in the arena."""
    if tensor.numel() == 0:
        return True
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr() - arena.address
    return tensor.device == arena.device and 0 <= start <= arena.nbytes - (span + 1) * tensor.itemsize
