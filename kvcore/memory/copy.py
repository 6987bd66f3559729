"""Block operations by bytes, for every layout and placement: copy (copy on write), zero, swap.

A block's bytes are strided runs, so that all layers of a group are a few strided views:

    slots, block-first   [layers, 1, blocks, block_stride]     slots, field-first  [layers, F, blocks, piece]
    packed               [1, 1, blocks, block_stride]          one contiguous piece a block
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvcore.errors import IntegrityError, LayoutError
from kvcore.memory.arena import Arena
from kvcore.memory.kernels import block_copy
from kvcore.memory.staging import uploaded
from kvcore.memory.views import strided_view
from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

Pairs = Sequence[tuple[int, int]]


def block_views(arena: Arena, config: KVCacheConfig, group: int) -> list[torch.Tensor]:
    """int8 views [layers, runs, blocks, bytes] that together are all bytes of a group's blocks.

    Layers whose tensors have one stride and lie at even distances are one view.
    """
    spec = config.kv_cache_groups[group]
    if config.placement == "packed":
        shape, strides = (1, 1, spec.num_blocks, spec.block_stride), (0, 0, spec.block_stride, 1)
        return [_view(arena, 0, shape, strides)]
    runs = len(spec.layout.places) if spec.layout.field_first else 1
    views = []
    for tensors in _even_runs(config, spec):
        first = tensors[0]
        piece = first.block_stride // runs
        step = tensors[1].offset - first.offset if len(tensors) > 1 else 0
        shape = (len(tensors), runs, spec.num_blocks, piece)
        views.append(_view(arena, first.offset, shape, (step, spec.num_blocks * piece, piece, 1)))
    return views


def copy_blocks(arena: Arena, config: KVCacheConfig, group: int, pairs: Pairs) -> None:
    """Copy blocks of one group in all its layers; every source is read before any target is written.

    Args:
        arena: The bytes.
        config: Their plan.
        group: Index of the KV group.
        pairs: (from, to) manager block ids.

    Raises:
        IntegrityError: An id is out of range, a target is a null block or appears twice.
    """
    copy_between(arena, config, arena, config, group, pairs)


def copy_between(
    source: Arena, source_config: KVCacheConfig, target: Arena, target_config: KVCacheConfig, group: int, pairs: Pairs
) -> None:
    """Copy blocks of one group from one arena to another (swap out, swap in); the devices may differ.

    The two plans may hold unlike numbers of blocks; their groups and layouts must be the same.

    Raises:
        IntegrityError: An id is out of range, a target is a null block or appears twice.
        LayoutError: The group's bytes lie otherwise in the two plans.
    """
    if not pairs:
        return
    reader, writer = source_config.kv_cache_groups[group], target_config.kv_cache_groups[group]
    _check_same(source_config, target_config, reader, writer)
    check_blocks(reader, [a for a, _ in pairs], null_allowed=True)
    targets = [b for _, b in pairs]
    check_blocks(writer, targets)
    if len(set(targets)) < len(targets):
        raise IntegrityError("a block is copied to twice in one step", field="pairs", got=targets)
    from_n, to_n = uploaded([a for a, _ in pairs], source.device), uploaded(targets, target.device)
    outs = block_views(source, source_config, group)
    ins = block_views(target, target_config, group)
    overlap = source is target and not set(targets).isdisjoint(a for a, _ in pairs)
    for view, other in zip(_split(outs, ins), _split(ins, outs), strict=True):
        block_copy.copy_blocks(view, other, from_n, to_n, overlap=overlap)


def zero_blocks(arena: Arena, config: KVCacheConfig, group: int, blocks: Sequence[int]) -> None:
    """Zero every byte of blocks of one group, in all its layers.

    Raises:
        IntegrityError: An id is out of range or a null block.
    """
    if not blocks:
        return
    check_blocks(config.kv_cache_groups[group], blocks)
    ids = uploaded(blocks, arena.device)
    for view in block_views(arena, config, group):
        block_copy.zero_blocks(view, ids)


def check_blocks(group: KVCacheGroupSpec, blocks: Sequence[int], *, null_allowed: bool = False) -> None:
    """Raise `IntegrityError` unless every id is a block of the group (null blocks only where allowed)."""
    lowest = 0 if null_allowed else max(1, group.blocks_per_large_page)
    for block in (min(blocks), max(blocks)):
        if not lowest <= block < group.num_blocks:
            raise IntegrityError(
                f"KV group {group.index} has no block {block} to write or read here",
                field="block_id",
                got=block,
                allowed=f"{lowest} to {group.num_blocks - 1}",
            )


def _view(arena: Arena, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return strided_view(arena, name="blocks", element=torch.int8, offset=offset, shape=shape, strides=strides)


def _even_runs(config: KVCacheConfig, group: KVCacheGroupSpec) -> Iterator[list[KVCacheTensor]]:
    """The group's tensors, cut into runs of one stride at even distances."""
    mine, run = set(group.cache_ids), list[KVCacheTensor]()
    for tensor in config.kv_cache_tensors:
        if mine.isdisjoint(tensor.shared_by):
            continue
        even = len(run) < 2 or tensor.offset - run[-1].offset == run[1].offset - run[0].offset
        if run and not (even and tensor.block_stride == run[0].block_stride):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _split(views: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Layer by layer where the other plan cuts the layers into other runs, else as they are."""
    if [len(v) for v in views] == [len(v) for v in others]:
        yield from views
    else:
        yield from (view[i : i + 1] for view in views for i in range(len(view)))


def _check_same(
    source: KVCacheConfig, target: KVCacheConfig, reader: KVCacheGroupSpec, writer: KVCacheGroupSpec
) -> None:
    def facts(config: KVCacheConfig, group: KVCacheGroupSpec) -> dict[str, object]:
        tensors = [t.block_stride for t in config.kv_cache_tensors if set(group.cache_ids) & set(t.shared_by)]
        return {
            "placement": config.placement,
            "layers": len(group.cache_ids),
            "block strides": tensors if config.placement == "slots" else [group.block_stride],
            "ratio": group.ratio,
            "layout": group.layout.fingerprint,
        }

    got, allowed = facts(source, reader), facts(target, writer)
    if got != allowed:
        raise LayoutError(
            f"blocks of KV group {reader.index} lie otherwise in the two arenas",
            field="layout",
            got=got,
            allowed=allowed,
            remedy="plan both arenas from the same specs and layouts, or convert (kvcore.memory.convert)",
        )
