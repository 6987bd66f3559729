"""Where each element of a cache lies, by this module's own arithmetic over the axes of a layout.

Deliberately slow and separate from `kvcore.memory.views` and from `SizedLayout.places`: the kit writes
history and reads results through these addresses, so that a fault in a view, a stride or an offset shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.layout import LayoutField

Addresses = npt.NDArray[np.int64]
_WIDTH = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


def field_sizes(field: LayoutField, kernel_block_size: int) -> list[int]:
    """The size of every axis in memory order; the open token axis gets the tokens that are left over."""
    fixed = 1
    for name, size in field.axes:
        if name == "token" and size is not None:
            fixed *= size
    return [kernel_block_size // fixed if size is None else size for _, size in field.axes]


def field_bytes(field: LayoutField, kernel_block_size: int) -> int:
    """Bytes of a field in one kernel block, without padding."""
    elements = int(np.prod(field_sizes(field, kernel_block_size)))
    return elements // 2 if field.dtype == "int4" else elements * _WIDTH[field.dtype]


def field_starts(fields: Sequence[LayoutField], kernel_block_size: int, alignment: int) -> tuple[list[int], int]:
    """Where each field starts in a block-first kernel page, and the page's bytes."""
    starts, end = [], 0
    for field in fields:
        starts.append(end)
        end += field_bytes(field, kernel_block_size)
        end += -end % alignment
    return starts, end


def element_addresses(config: KVCacheConfig, cache: CacheId, name: str, slots: Sequence[int]) -> Addresses:
    """Byte address of every element of some slots, [slots, elements in logical order].

    Args:
        config: The plan.
        cache: The cache.
        name: The field.
        slots: Slot numbers, ``block * block_size + offset``.
    """
    group = config.group_of(cache)
    index = [f.name for f in group.layout.layout.fields].index(name)
    field = group.layout.layout.fields[index]
    base, stride = field_place(config, group, group.shared.get(cache, cache), index)
    sizes = field_sizes(field, group.kernel_block_size)
    steps, step = [0] * len(sizes), _WIDTH[field.dtype]
    for axis in range(len(sizes) - 1, -1, -1):
        steps[axis] = step
        step *= sizes[axis]
    block, offset = np.divmod(np.asarray(slots, dtype=np.int64), group.kernel_block_size)
    address = (base + block * stride + _along(field, "token", sizes, steps, offset))[:, None]
    logical = next(f for f in group.spec.content.fields() if f.name == name)
    for axis_name, size in logical.axes:
        along = _along(field, axis_name, sizes, steps, np.arange(size, dtype=np.int64))
        address = (address[:, :, None] + along).reshape(len(block), address.shape[1] * size)
    return address


def _along(field: LayoutField, name: str, sizes: Sequence[int], steps: Sequence[int], index: Addresses) -> Addresses:
    """Bytes that an index along a logical axis adds; split axes count like digits, outer part first."""
    total, rest = np.zeros_like(index), index
    for axis in range(len(sizes) - 1, -1, -1):
        if field.axes[axis].name == name:
            rest, digit = np.divmod(rest, sizes[axis])
            total = total + digit * steps[axis]
    return total


def field_place(config: KVCacheConfig, group: KVCacheGroupSpec, owner: CacheId, index: int) -> tuple[int, int]:
    """Byte of a field in kernel block 0, and bytes from one kernel block to the next."""
    layout = group.layout.layout
    ratio = group.block_size // group.kernel_block_size
    starts, page = field_starts(layout.fields, group.kernel_block_size, layout.alignment)
    if config.placement == "packed":
        return group.cache_ids.index(owner) * page + starts[index], group.block_stride // ratio
    tensor = next(t for t in config.kv_cache_tensors if owner in t.shared_by)
    if layout.order == "field_first":
        piece = tensor.block_stride // len(layout.fields)
        return tensor.offset + index * group.num_blocks * piece, piece // ratio
    return tensor.offset + starts[index], tensor.block_stride // ratio


class PagedBytes:
    """Reads and writes elements of a cache in a flat array of bytes.

    Args:
        memory: uint8 [bytes of the arena].
        config: Its plan.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], config: KVCacheConfig) -> None:
        self.memory = memory
        self.config = config

    def where(self, cache: CacheId, name: str, slots: Sequence[int]) -> Addresses:
        """Every byte of some slots, flat."""
        width = self._width(cache, name)
        address = element_addresses(self.config, cache, name, slots)
        return (address[..., None] + np.arange(width)).reshape(-1)

    def write(self, cache: CacheId, name: str, slots: Sequence[int], values: torch.Tensor) -> None:
        """Store `values` [slots, *logical axes], in the field's own dtype."""
        memory, address = self._elements(cache, name, slots)
        memory[address] = values.contiguous().view(torch.uint8).numpy().reshape(-1).view(memory.dtype)

    def read(self, cache: CacheId, name: str, slots: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """The elements of some slots, with the dtype and trailing shape of `like`."""
        memory, address = self._elements(cache, name, slots)
        found = torch.from_numpy(memory[address].view(np.uint8))
        return found.view(like.dtype).view(len(slots), *like.shape[1:])

    def _elements(self, cache: CacheId, name: str, slots: Sequence[int]) -> tuple[npt.NDArray[Any], Addresses]:
        """The memory as elements of the field's width, and those of some slots; bytes where they are unaligned."""
        width = self._width(cache, name)
        address = element_addresses(self.config, cache, name, slots).reshape(-1)
        if width == 1 or len(self.memory) % width or (address % width).any():
            return self.memory, self.where(cache, name, slots)
        return self.memory.view(f"u{width}"), address // width

    def _width(self, cache: CacheId, name: str) -> int:
        fields = self.config.group_of(cache).layout.layout.fields
        return _WIDTH[next(f.dtype for f in fields if f.name == name)]
