"""A `KVCacheConfig` drawn in characters, and the same numbers as data.

Nothing is computed here twice: every offset and stride comes from the plan.
"""

from __future__ import annotations

from typing import Any

from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.plan.explain import size
from kvcore.spec.cache_spec import shown
from kvcore.spec.layout import SizedLayout

WIDTH = 72
MOST_TENSORS = 6


def describe(config: KVCacheConfig) -> dict[str, Any]:
    """Groups, tensors and the views of every cache, as data."""
    return {
        "placement": config.placement,
        "total_bytes": config.total_bytes,
        "num_blocks": config.num_blocks or None,
        "num_large_pages": config.num_large_pages or None,
        "large_page_bytes": config.large_page_bytes or None,
        "groups": [_group(g) for g in config.kv_cache_groups],
        "tensors": [
            {
                "offset": t.offset,
                "bytes": t.nbytes,
                "block_stride": t.block_stride or None,
                "shared_by": [str(c) for c in t.shared_by],
            }
            for t in config.kv_cache_tensors
        ],
        "caches": [
            {
                "cache": str(cache),
                "group": group.index,
                "shares": str(group.shared[cache]) if cache in group.shared else None,
                "fields": [v._asdict() for v in config.field_views(cache)],
            }
            for group in config.kv_cache_groups
            for cache in (*group.cache_ids, *group.shared)
        ],
    }


def _group(group: KVCacheGroupSpec) -> dict[str, Any]:
    layout = group.layout
    return {
        "index": group.index,
        "kind": group.spec.kind,
        "backend": group.backend,
        "layout": layout.layout.name,
        "order": layout.layout.order,
        "alignment": layout.layout.alignment,
        "layers": [str(c) for c in group.cache_ids],
        "block_size": group.block_size,
        "kernel_block_size": group.kernel_block_size,
        "kernel_page_bytes": layout.kernel_page_bytes,
        "page_bytes": group.page_bytes,
        "block_stride": group.block_stride,
        "num_blocks": group.num_blocks,
        "padding_bytes": layout.kernel_page_bytes - layout.payload_bytes,
        "fields": [{**place._asdict(), "axes": _axes(layout, i)} for i, place in enumerate(layout.places)],
    }


def _axes(layout: SizedLayout, index: int) -> list[str]:
    return list(layout.layout.fields[index].axis_names)


def draw(config: KVCacheConfig) -> str:
    """The picture for people."""
    lines = [f"arena: {config.total_bytes} bytes ({size(config.total_bytes)}), placement {config.placement}"]
    for group in config.kv_cache_groups:
        lines += ["", *_draw_group(group)]
    lines += ["", *(_draw_packed(config) if config.placement == "packed" else _draw_slots(config))]
    return "\n".join(lines)


def _draw_group(group: KVCacheGroupSpec) -> list[str]:
    layout, count = group.layout, len(group.cache_ids)
    kernel = f" = {group.ratio} kernel blocks of {group.kernel_block_size}" if group.ratio > 1 else ""
    unit = "state" if group.spec.content.per_request else f"{group.block_size} tokens{kernel}"
    lines = [
        f"group {group.index} {group.spec.kind}: {shown(group.cache_ids)}{f' ({count} layers)' if count > 1 else ''}; "
        f"{group.backend or 'no backend'}, layout {layout.layout.name}, {layout.layout.order}",
        f"  a block is {unit}; ids 0 .. {group.num_blocks - 1}, page of one layer {group.page_bytes} bytes",
    ]
    what = "a piece of each field" if layout.field_first else "a kernel page"
    lines.append(f"  {what}, memory order, alignment {layout.layout.alignment}:")
    lines.append("  " + _bar([(p.name, p.nbytes) for p in layout.places], layout.kernel_page_bytes))
    end = 0
    for i, place in enumerate(layout.places):
        if place.offset > end:
            lines.append(f"    {end:>10}  padding, {place.offset - end} bytes")
        axes = ", ".join(f"{a} {n}" for a, n in zip(_axes(layout, i), place.shape, strict=True))
        lines.append(
            f"    {place.offset:>10}  {place.name} ({axes}) {place.dtype}, {place.nbytes} bytes, "
            f"strides {', '.join(map(str, place.strides))}"
        )
        end = place.offset + place.nbytes
        if layout.field_first and layout.piece_bytes > place.nbytes:
            lines.append(f"    {place.nbytes:>10}  padding, {layout.piece_bytes - place.nbytes} bytes")
    if not layout.field_first and layout.kernel_page_bytes > end:
        lines.append(f"    {end:>10}  padding, {layout.kernel_page_bytes - end} bytes")
    return lines


def _draw_slots(config: KVCacheConfig) -> list[str]:
    last = config.num_blocks - 1
    first = config.kv_cache_groups[0].layout
    lines = ["tensors; every block id has its bytes at the same place in each of them:"]
    tensors = config.kv_cache_tensors
    for i, tensor in enumerate(tensors):
        if len(tensors) > MOST_TENSORS and MOST_TENSORS - 2 <= i < len(tensors) - 1:
            # Long models: the numbers of all are in the JSON form.
            if i == MOST_TENSORS - 2:
                lines.append(f"  ... tensors {i} to {len(tensors) - 2} in the same way")
            continue
        owners = ", ".join(f"{c} (group {config.group_of(c).index})" for c in tensor.shared_by)
        lines.append(f"  tensor {i} at {tensor.offset}: {tensor.nbytes} bytes; {owners}")
        slack = tensor.block_stride - max(config.group_of(c).page_bytes for c in tensor.shared_by)
        note = f", {slack} of them padding" if slack else ""
        if first.field_first:
            runs = len(first.places)
            piece = tensor.block_stride // runs
            run = " ".join(f"| {p.name}: 0 1 2 .. {last} " for p in first.places)
            lines.append(f"    {run}|   {runs} runs of {config.num_blocks} pieces of {piece} bytes{note}")
        else:
            ids = f"| 0 null | 1 | 2 | .. | {last} |" if last > 0 else "| 0 null |" if last == 0 else "| |"
            lines.append(f"    {ids}   {tensor.block_stride} bytes a block{note}")
    return lines


def _draw_packed(config: KVCacheConfig) -> list[str]:
    large = config.large_page_bytes
    lines = [
        f"{config.num_large_pages} large pages of {large} bytes ({size(large)}); "
        "large page 0 holds the null blocks; each group cuts a large page with its own ruler:"
    ]
    for group in config.kv_cache_groups:
        count = group.blocks_per_large_page
        used = group.page_bytes * len(group.cache_ids)
        lines.append("  " + _bar([(f"g{group.index}", group.block_stride)] * count, large))
        lines.append(
            f"    group {group.index}: {count} blocks of {group.block_stride} bytes, "
            f"{group.block_stride - used} of them padding; the layers' pages lie one after the other"
        )
    return lines


def _bar(parts: list[tuple[str, int]], total: int) -> str:
    """Parts in proportion to their bytes; dots are padding."""
    if len(parts) > 16:
        return f"| {parts[0][0]} x {len(parts)} |"
    cells = [max(len(name) + 2, round(WIDTH * n / total)) for name, n in parts]
    rest = round(WIDTH * (total - sum(n for _, n in parts)) / total)
    bar = "|".join(name.center(width) for (name, _), width in zip(parts, cells, strict=True))
    return f"|{bar}|" + ("." * max(rest, 1) + "|" if total > sum(n for _, n in parts) else "")
