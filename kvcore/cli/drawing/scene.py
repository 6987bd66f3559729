"""What is drawn: rows of areas, each as many bytes as it stands for; the plan alone says how many.

the arena by place       | tensor 0      | tensor 1      | ...         adds up to the arena
the arena by use         | null | full 0 | padding | ... | left |      adds up to the arena
one block of a group     | L0 | L2 | L4 | padding |                    what a block id covers, or a large page
one page                 | k | v | k_scale | padding |                 a kernel page of one layer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvcore.plan.capacity import Capacity
from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.plan.terms import arena_terms
from kvcore.spec.layout import SizedLayout

# Areas of a strip that are drawn one by one; what is behind them is drawn as one, to scale.
MOST_AREAS = 240
# Large pages, and blocks of one, that are drawn one by one; of more blocks, so many.
MOST_PAGES = 100
FEW_BLOCKS = 8
WORDS = {
    "null": "null block: zeros, never handed out",
    "padding": "padding",
    "begun": "rest of begun large pages",
    "step": "kept free for a step",
    "left": "left over",
    "between": "up to the next multiple of 256",
}


@dataclass(frozen=True)
class Area:
    """Some bytes that lie together.

    Attributes:
        kind: ``tensor``, ``block``, ``page``, ``field``, ``payload``, or what is no content: ``null``, ``padding``,
            ``begun``, ``step``, ``left``, ``between``.
        label: Written into it where there is room.
        nbytes: Bytes.
        offset: Of its first byte, from the start of the row; None where it only counts.
        group: KV group, for its colour.
        note: Said on hover, with the bytes.
    """

    kind: str
    label: str
    nbytes: int
    offset: int | None = None
    group: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """Bytes on one scale, as one or more strips that each add up to `nbytes`.

    Attributes:
        title: Above it.
        nbytes: Bytes of the whole width.
        strips: From above; each cuts the same bytes more finely.
        origin: Where the row begins in the arena, or None where it does not lie in one place.
    """

    title: str
    nbytes: int
    strips: tuple[tuple[Area, ...], ...]
    origin: int | None = None


def scene(capacity: Capacity) -> list[Row]:
    """The rows of a plan, the whole arena first."""
    config = capacity.config
    rows = [_by_place(config), _by_use(capacity)]
    for group in config.kv_cache_groups:
        rows += _packed_rows(config, group) if config.placement == "packed" else [_slots_row(config, group)]
    alike: dict[tuple[str, SizedLayout], list[KVCacheGroupSpec]] = {}
    for group in config.kv_cache_groups:
        alike.setdefault((group.spec.kind, group.layout), []).append(group)
    rows += [_page_row(groups) for groups in alike.values()]
    return [replace(row, strips=tuple(_few(strip) for strip in row.strips)) for row in rows if row.nbytes]


def _by_place(config: KVCacheConfig) -> Row:
    title = f"the arena by place: {config.total_bytes} bytes"
    if config.placement == "packed":
        large = config.large_page_bytes
        alone = config.num_large_pages if config.num_large_pages <= MOST_PAGES else min(1, config.num_large_pages)
        pages = [_large_page(p, large) for p in range(alone)]
        rest = config.num_large_pages - alone
        if rest:
            note = f"large pages {alone} to {config.num_large_pages - 1}, each free or of one group at a time"
            pages.append(Area("block", f"{rest} large pages", rest * large, alone * large, note=note))
        return Row(f"{title} = {config.num_large_pages} large pages of {large}", config.total_bytes, (tuple(pages),), 0)
    tensors: list[Area] = []
    blocks: list[Area] = []
    for i, tensor in enumerate(config.kv_cache_tensors):
        end = tensors[-1].offset + tensors[-1].nbytes if tensors and tensors[-1].offset is not None else 0
        if tensor.offset > end:
            gap = Area("between", "", tensor.offset - end, end, note=WORDS["between"])
            tensors.append(gap)
            blocks.append(gap)
        owners = ", ".join(map(str, tensor.shared_by))
        tensors.append(Area("tensor", str(i), tensor.nbytes, tensor.offset, note=f"tensor {i}, shared by {owners}"))
        null = min(tensor.block_stride, tensor.nbytes)
        if null:
            blocks.append(Area("null", "", null, tensor.offset, note=f"{WORDS['null']}, in tensor {i}"))
        if tensor.nbytes > null:
            count = tensor.nbytes // tensor.block_stride - 1
            note = f"blocks 1 to {count} of tensor {i}, {tensor.block_stride} bytes each"
            blocks.append(Area("block", "", tensor.nbytes - null, tensor.offset + null, note=note))
    title = f"{title} = {_counted(len(config.kv_cache_tensors), 'tensor')} of {_counted(config.num_blocks, 'block')}"
    return Row(title, config.total_bytes, (tuple(tensors), tuple(blocks)), 0)


def _large_page(number: int, nbytes: int) -> Area:
    if number:
        return Area("block", str(number), nbytes, number * nbytes, note=f"large page {number}")
    return Area("null", "", nbytes, 0, note="large page 0: the null blocks of all groups")


def _by_use(capacity: Capacity) -> Row:
    config, longest = capacity.config, capacity.limits.max_model_len
    areas = []
    for term in arena_terms(capacity):
        if term.group is None:
            word = WORDS[term.name]
            areas.append(Area(term.name, word.split(":")[0], term.nbytes, note=word))
        else:
            kind = config.kv_cache_groups[term.group].spec.kind
            word = f"{kind} {term.group}" if term.name == "payload" else "padding"
            note = f"{term.name} of group {term.group}, {kind}"
            areas.append(Area(term.name, word, term.nbytes, group=term.group, note=note))
    count = capacity.simultaneous(longest)
    return Row(f"the arena by use: {count} whole sequences of {longest} tokens", config.total_bytes, (tuple(areas),))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _named(group: KVCacheGroupSpec) -> str:
    unit = "state" if group.spec.content.per_request else f"{group.block_size} tokens"
    return f"group {group.index} {group.spec.kind}, {_counted(len(group.cache_ids), 'layer')}: one block of {unit}"


def _slots_row(config: KVCacheConfig, group: KVCacheGroupSpec) -> Row:
    """What one block id of the group covers, in all tensors."""
    pieces: list[Area] = []
    pages: list[Area] = []
    at, block = 0, min(1, group.num_blocks - 1)
    for i, tensor in enumerate(config.kv_cache_tensors):
        stride = tensor.block_stride
        where = f"block {block} at {tensor.offset + block * stride} in the arena"
        pieces.append(Area("tensor", f"t{i}", stride, at, note=f"tensor {i}; {where}"))
        owner = next((c for c in tensor.shared_by if config.group_of(c).index == group.index), None)
        used = group.page_bytes if owner is not None else 0
        if owner is not None:
            pages.append(Area("page", str(owner), used, at, group.index, f"page of {owner}; {where}"))
        if stride > used:
            why = (
                "no layer of this group lies in this tensor" if owner is None else "the page is smaller than the stride"
            )
            pages.append(Area("padding", "", stride - used, at + used, note=f"padding: {why}"))
        at += stride
    title = f"{_named(group)}, page of one layer {group.page_bytes} bytes"
    return Row(title, at, (tuple(pieces), tuple(pages)))


def _packed_rows(config: KVCacheConfig, group: KVCacheGroupSpec) -> list[Row]:
    """A large page as the group cuts it, and one block."""
    large, stride, cut = config.large_page_bytes, group.block_stride, group.blocks_per_large_page
    page = min(1, config.num_large_pages - 1)
    used = group.page_bytes * len(group.cache_ids)
    alone = cut if cut <= MOST_PAGES else FEW_BLOCKS
    runs = [(1, i) for i in range(alone)] + [(cut - alone, alone)] * (cut > alone)
    blocks, inside = [], []
    for count, i in runs:
        label = str(page * cut + i) if count == 1 else f"{count} more blocks"
        note = f"block {page * cut + i} of group {group.index}" + (f" and {count - 1} more" if count > 1 else "")
        blocks.append(Area("block", label, count * stride, i * stride, group.index, note))
        # The padding of many blocks lies between them; drawn as one it has no place.
        where = i * stride if count == 1 else None
        inside.append(Area("payload", "", count * used, where, group.index, f"fields of {note}"))
        if stride > used:
            where = i * stride + used if count == 1 else None
            inside.append(Area("padding", "", count * (stride - used), where, note=f"padding of {note}"))
    title = f"group {group.index} {group.spec.kind}: a large page of {large} bytes, cut into {cut} blocks of {stride}"
    origin = page * large
    pages = list(_kernel_pages(group))
    if stride > used:
        pages.append(
            Area("padding", "", stride - used, used, note="padding of the block, so that M is a multiple of it")
        )
    block = Row(f"{_named(group)}, {stride} bytes", stride, (tuple(pages),), origin)
    return [Row(title, large, (tuple(blocks), tuple(inside)), origin), block] if cut > 1 else [block]


def _kernel_pages(group: KVCacheGroupSpec) -> Iterator[Area]:
    """Layers of one block: each of its kernel blocks holds the kernel pages of all layers."""
    size, step = group.layout.kernel_page_bytes, group.block_stride // group.ratio
    slack = step - size * len(group.cache_ids)
    for j in range(group.ratio):
        for i, cache in enumerate(group.cache_ids):
            note = f"page of {cache}" + (f", kernel block {j}" if group.ratio > 1 else "")
            yield Area("page", str(cache), size, j * step + i * size, group.index, note)
        if slack and j + 1 < group.ratio:
            yield Area("padding", "", slack, (j + 1) * step - slack, note="padding of a kernel block")


def _page_row(groups: Sequence[KVCacheGroupSpec]) -> Row:
    """One kernel page of one layer of these groups, which have the same: its fields."""
    group = groups[0]
    layout = group.layout
    areas: list[Area] = []
    at = 0
    for i, place in enumerate(layout.places):
        start = i * layout.piece_bytes if layout.field_first else place.offset
        if start > at:
            areas.append(Area("padding", "", start - at, at, note="padding: alignment"))
        axes = zip(layout.layout.fields[i].axes, place.shape, strict=True)
        shape = ", ".join(f"{axis.name} {n}" for axis, n in axes)
        note = f"{place.name} ({shape}) {place.dtype}"
        areas.append(Area("field", place.name, place.nbytes, start, group.index, note))
        at = start + place.nbytes
    if layout.kernel_page_bytes > at:
        areas.append(Area("padding", "", layout.kernel_page_bytes - at, at, note="padding: alignment"))
    runs = "; each field is a run of its own" if layout.field_first else ""
    what = f"a page of one layer, {group.kernel_block_size} tokens, layout {layout.layout.name}"
    if group.spec.content.per_request:
        what = "the state of one layer"
    names = f"group{'s' if len(groups) > 1 else ''} {', '.join(str(g.index) for g in groups)} {group.spec.kind}"
    return Row(f"{names}: {what}, {layout.kernel_page_bytes} bytes{runs}", layout.kernel_page_bytes, (tuple(areas),))


def _few(strip: Sequence[Area]) -> tuple[Area, ...]:
    """The strip, with what is behind `MOST_AREAS` areas as one area of each kind."""
    kept, rest = list(strip[:MOST_AREAS]), strip[MOST_AREAS:]
    for kind in dict.fromkeys(a.kind for a in rest):
        mine = [a for a in rest if a.kind == kind]
        total = sum(a.nbytes for a in mine)
        kept.append(
            Area(kind, f"{len(mine)} more", total, None, mine[0].group, f"{len(mine)} more: {mine[0].note} and on")
        )
    return tuple(kept)
