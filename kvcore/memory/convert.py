"""Moves cached tokens between layouts, bit for bit: no number is read, so that no number can change.

Where two layouts have one fingerprint, bytes can be copied as they are (`memory.copy`). Where they have not,
every element goes from its place in one layout to its place in the other:

    slot = kernel block * P + offset     place = block * stride + sum of index * stride over the field's axes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.errors import IntegrityError, LayoutError
from kvcore.memory.arena import Arena
from kvcore.memory.copy import Pairs, check_blocks
from kvcore.plan.config import FieldView, KVCacheConfig, KVCacheGroupSpec
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.dtypes import dtype
from kvcore.spec.layout import TOKEN, LayoutField, SizedLayout

_RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are moved at once: their indices take sixteen bytes each.
PIECE = 1 << 20


def require_readable(fingerprint: str, layout: SizedLayout) -> None:
    """Raise `LayoutError` unless bytes written under `fingerprint` can be read under `layout` as they are."""
    if fingerprint != layout.fingerprint:
        raise LayoutError(
            f"the cache was written in another layout than {layout.layout.name}",
            field="layout.fingerprint",
            got=fingerprint,
            allowed=layout.fingerprint,
            remedy="convert it first (kvcore.memory.convert)",
        )


def convert_blocks(
    source: Arena, source_config: KVCacheConfig, target: Arena, target_config: KVCacheConfig, group: int, pairs: Pairs
) -> None:
    """Move whole blocks of one group, in all its layers, to blocks of the same size in another layout.

    Args:
        source: Read.
        source_config: Its plan.
        target: Written; another arena, on any device.
        target_config: Its plan, with the same caches in the group.
        group: Index of the KV group in both plans.
        pairs: (from, to) manager block ids.

    Raises:
        IntegrityError: An id is out of range, or a target is a null block or appears twice.
        LayoutError: The groups hold unlike caches, contents or block sizes.
    """
    reader, writer = source_config.kv_cache_groups[group], target_config.kv_cache_groups[group]
    if reader.block_size != writer.block_size or reader.cache_ids != writer.cache_ids:
        raise LayoutError(
            f"blocks of KV group {group} hold other tokens in the two plans",
            field="block_size",
            got=(reader.block_size, list(map(str, reader.cache_ids))),
            allowed=(writer.block_size, list(map(str, writer.cache_ids))),
            remedy="move tokens by slot (convert_slots)",
        )
    if not pairs:
        return
    check_blocks(reader, [a for a, _ in pairs], null_allowed=True)
    check_blocks(writer, [b for _, b in pairs])
    size = reader.block_size
    from_slots, to_slots = ([b * size + j for b in ids for j in range(size)] for ids in zip(*pairs, strict=True))
    for cache in reader.cache_ids:
        convert_slots(source, source_config, target, target_config, cache, from_slots, to_slots)


def convert_slots(
    source: Arena,
    source_config: KVCacheConfig,
    target: Arena,
    target_config: KVCacheConfig,
    cache: CacheId,
    from_slots: Sequence[int],
    to_slots: Sequence[int],
) -> None:
    """Move tokens of one cache; block sizes, kernel block sizes and placements may differ.

    Args:
        source: Read.
        source_config: Its plan.
        target: Written; another arena, on any device.
        target_config: Its plan.
        cache: The cache, of equal content in both plans.
        from_slots: Slots of the source; blocks of a state, where it is kept per request.
        to_slots: As many distinct slots of the target.

    Raises:
        IntegrityError: Slots are out of range, repeated, or not as many.
        LayoutError: The contents differ, or numbers of less than a byte are packed along unlike axes.
    """
    reader, writer = source_config.group_of(cache), target_config.group_of(cache)
    if reader.spec.content != writer.spec.content:
        raise LayoutError(
            f"{cache} stores other things in the two plans",
            field="content",
            got=reader.spec.content,
            allowed=writer.spec.content,
        )
    if source is target:
        raise IntegrityError("a cache is converted from one arena to another", field="target", got="the source")
    _check_slots(reader, from_slots, "from_slots")
    _check_slots(writer, to_slots, "to_slots")
    if len(from_slots) != len(to_slots) or len(set(to_slots)) < len(to_slots):
        raise IntegrityError(
            "tokens are moved one to one",
            field="to_slots",
            got=f"{len(set(to_slots))} distinct",
            allowed=len(from_slots),
        )
    if not from_slots:
        return
    ins = {v.name: v for v in source_config.field_views(cache)}
    outs = {v.name: v for v in target_config.field_views(cache)}
    from_n = torch.tensor(from_slots, device=source.device)
    to_n = torch.tensor(to_slots, device=target.device)
    for name in ins:
        read, write = _Places(reader, ins[name], source), _Places(writer, outs[name], target)
        if read.order != write.order:
            raise LayoutError(
                f"field {name} packs several numbers in a byte, along unlike axes",
                field=name,
                got=read.order,
                allowed=write.order,
            )
        step = max(1, PIECE // read.per_token)
        for start in range(0, len(from_n), step):
            piece = slice(start, start + step)
            values = read.flat[read.of(from_n[piece])]
            write.flat[write.of(to_n[piece])] = values.to(target.device)


class _Places:
    """Where every element of a token lies in one field, in the order of the content's axes.

    Args:
        group: Layout and kernel block size.
        view: Offset and strides of the field.
        arena: The bytes.
    """

    def __init__(self, group: KVCacheGroupSpec, view: FieldView, arena: Arena) -> None:
        field = next(f for f in group.layout.layout.fields if f.name == view.name)
        logical = next(f for f in group.spec.content.fields() if f.name == view.name)
        bits = dtype(view.dtype).bits
        width = max(1, bits // 8)
        self.flat = arena.as_dtype(_RAW[width])
        self.size = 1 if group.spec.content.per_request else group.kernel_block_size
        self.order = field.axes[-1].name if bits < 8 else None
        self._base, self._block = view.offset // width, view.strides[0] // width
        strides = [s // width for s in view.strides[1:]]
        device = arena.device
        sizes = dict(logical.axes)
        if bits < 8:
            self._count_in_bytes(field, view, sizes)
        offsets = torch.zeros((), dtype=torch.int64, device=device)
        for name, count in sizes.items():
            index = torch.arange(count, device=device)
            offsets = offsets[..., None] + _along(field, view, strides, name, index)
        self._element = offsets.reshape(-1)
        self.per_token = self._element.numel()
        self._token = _along(field, view, strides, TOKEN, torch.arange(self.size, device=device))

    @staticmethod
    def _count_in_bytes(field: LayoutField, view: FieldView, sizes: dict[str, int]) -> None:
        """The packed axis counts bytes, as the view does."""
        last = field.axes[-1].name
        if last not in sizes or field.axis_names.count(last) > 1:
            raise LayoutError(
                f"field {field.name} packs several numbers in a byte along an axis that is split, or tokens",
                field=field.name,
                got=field.axis_names,
                allowed="a whole axis of the content",
            )
        sizes[last] = view.shape[-1]

    def of(self, slots_n: torch.Tensor) -> torch.Tensor:
        """int64 [n, elements of a token]: indices into `flat`."""
        blocks = slots_n.div(self.size, rounding_mode="floor")
        start = self._base + blocks * self._block + self._token[slots_n.remainder(self.size)]
        return start[:, None] + self._element


def _along(field: LayoutField, view: FieldView, strides: list[int], name: str, index: torch.Tensor) -> torch.Tensor:
    """Elements from index 0 of the axis `name` to each index; the axis may be split, outer part first."""
    places, inner = torch.zeros_like(index), 1
    for i in reversed(range(len(field.axes))):
        if field.axes[i].name == name:
            part = view.shape[1 + i]
            places += index.div(inner, rounding_mode="floor").remainder(part) * strides[i]
            inner *= part
    return places


def _check_slots(group: KVCacheGroupSpec, slots: Sequence[int], name: str) -> None:
    per_block = 1 if group.spec.content.per_request else group.block_size
    if slots and not 0 <= min(slots) <= max(slots) < group.num_blocks * per_block:
        raise IntegrityError(
            f"KV group {group.index} has no such slot",
            field=name,
            got=(min(slots), max(slots)),
            allowed=f"0 to {group.num_blocks * per_block - 1}",
        )
