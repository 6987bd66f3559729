"""Tensors over the arena: the only place where an offset and strides become a tensor.

Every view is made by `as_strided` and shares the arena's bytes; nothing here ever copies.
"""

from __future__ import annotations

import torch

from kvcore.errors import LayoutError
from kvcore.memory.arena import Arena
from kvcore.memory.dtypes import torch_dtype
from kvcore.plan.config import FieldView, KVCacheConfig
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import LogicalField
from kvcore.spec.layout import TOKEN, LayoutField


def strided_view(
    arena: Arena, *, name: str, element: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A view of the arena's bytes.

    Args:
        arena: The bytes.
        name: What the view is, for errors.
        element: Element type.
        offset: Bytes from the start of the arena.
        shape: Sizes.
        strides: Bytes from one index to the next, one for each size.

    Raises:
        LayoutError: The view would leave the arena, or an element would not be aligned to its own size.
    """
    width = element.itemsize
    if offset % width or any(s % width for s in strides):
        raise LayoutError(
            f"{name}: elements of {width} bytes would not be aligned",
            field=name,
            got={"offset": offset, "strides": strides},
            allowed=f"multiples of {width} bytes",
            remedy="declare a layout whose alignment is a multiple of every field's element size",
        )
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + width
    if offset < 0 or min(shape) < 1 or min(strides) < 0 or last > arena.nbytes:
        raise LayoutError(
            f"{name}: the view would leave the arena",
            field=name,
            got=f"bytes {offset} to {last}",
            allowed=f"bytes 0 to {arena.nbytes}",
        )
    steps = [s // width for s in strides]
    flat = arena.as_dtype(element)
    return flat.as_strided(shape, steps, flat.storage_offset() + offset // width)


def field_tensor(arena: Arena, view: FieldView, alignment: int = 1) -> torch.Tensor:
    """One field of one cache, [kernel blocks, *axes in memory order].

    Args:
        arena: The bytes.
        view: Where the field lies, from `KVCacheConfig.field_views`.
        alignment: Bytes to which the field must be aligned in every block.

    Raises:
        LayoutError: The view would leave the arena or break the alignment.
    """
    if view.offset % alignment or view.strides[0] % alignment:
        raise LayoutError(
            f"field {view.name} would not keep its alignment in every block",
            field=view.name,
            got={"offset": view.offset, "block stride": view.strides[0]},
            allowed=f"multiples of {alignment} bytes",
        )
    return strided_view(
        arena,
        name=view.name,
        element=torch_dtype(view.dtype),
        offset=view.offset,
        shape=view.shape,
        strides=view.strides,
    )


def field_tensors(arena: Arena, config: KVCacheConfig, cache: CacheId) -> dict[str, torch.Tensor]:
    """Every field of a cache by name; a shared cache gives its owner's views.

    Returns:
        Tensors [kernel blocks, *axes in memory order] over the arena's bytes.
    """
    alignment = config.group_of(cache).layout.layout.alignment
    return {view.name: field_tensor(arena, view, alignment) for view in config.field_views(cache)}


def logical_view(tensor: torch.Tensor, placed: LayoutField, logical: LogicalField) -> torch.Tensor:
    """A field view with its axes in logical order, [kernel blocks, token, *logical axes], by `permute`.

    Args:
        tensor: From `field_tensors`.
        placed: The field as its layout orders it.
        logical: The field as its content names it. Contents kept per request have no token axis.

    Raises:
        LayoutError: An axis is split in memory (x-packed keys), so that no permutation undoes it.
    """
    names = placed.axis_names
    if len(set(names)) < len(names):
        raise LayoutError(
            f"field {placed.name} has a split axis: a view in logical order does not exist",
            field=placed.name,
            got=names,
            allowed="layouts in which each axis appears once",
        )
    wanted = [TOKEN] * (TOKEN in names) + [name for name, _ in logical.axes]
    return tensor.permute(0, *(1 + names.index(name) for name in wanted))
