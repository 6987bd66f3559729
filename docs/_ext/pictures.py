"""Pictures of memory, drawn from plans that the code makes while the docs are built."""

from __future__ import annotations

from pathlib import Path

from kvcore.cli.drawing.scene import scene
from kvcore.cli.drawing.svg import svg
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.layout import KernelBlocks, LayoutOption, PageLayout, hnd, nhd
from kvcore.spec.retention import Full, Window

CONTENT = KVHeads(2, 8, dtype="float16")
LIMITS = Limits(max_model_len=128, max_num_batched_tokens=64, max_num_seqs=4)


def _hybrid(layout: PageLayout, budget: Budget, placement: str, every: int = 2) -> Plan:
    """Four layers: L0 and each `every`-th keep everything, the others a window of 32 tokens."""
    caches = {CacheId(i): KVCacheSpec(CONTENT, Window(32) if i % every else Full()) for i in range(4)}
    offer = LayoutOffer("example", (LayoutOption(layout, KernelBlocks(sizes=(16,))),))
    return plan(caches, dict.fromkeys(caches, offer), budget, LIMITS, placement=placement, block_size=16)


def layouts(docs: Path) -> str:
    """Fields of one kernel block in each layout: offsets, shapes and strides as the code has them."""
    int8 = KVHeads(2, 8, dtype="int8", quant=Quant("token_head"))
    shown = [
        ("NHD, block-first", nhd(CONTENT)),
        ("HND, block-first", hnd(CONTENT)),
        ("KV-first, field-first", nhd(CONTENT, name="kv_first", order="field_first")),
        ("NHD of an int8 cache with a scale for each token and head", nhd(int8)),
    ]
    lines = [
        "| layout | field | dtype | axes in memory order | shape | strides in bytes | offset |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, layout in shown:
        sized = layout.at(16)
        for place, field in zip(sized.places, layout.fields, strict=True):
            axes = ", ".join(a.name for a in field.axes)
            offset = "own run" if sized.field_first else str(place.offset)
            numbers = f"{place.shape} | {place.strides} | {offset}"
            lines.append(f"| {title} | `{place.name}` | {place.dtype} | {axes} | {numbers} |")
            title = ""
    return "\n".join(lines) + "\n"


def _views(config: KVCacheConfig, caches: list[int]) -> list[str]:
    lines = []
    for layer in caches:
        for view in config.field_views(CacheId(layer)):
            where = f"starts at byte {view.offset:>6}, shape {view.shape}, strides {view.strides}"
            lines.append(f"L{layer}.{view.name}: {where}")
    return lines


def _map(config: KVCacheConfig, layers: list[int], row: int, rows: int) -> list[str]:
    """One line for each run of `row` bytes: which (layer, block) of each layer covers it."""
    lines = []
    for start in range(0, row * rows, row):
        owners = []
        for layer in layers:
            group = config.group_of(CacheId(layer))
            found = [
                b
                for b in range(group.num_blocks)
                if any(s < start + row and start < e for s, e in config.footprint(CacheId(layer), b))
            ]
            owners.append(f"L{layer} block {', '.join(map(str, found))}" if found else f"L{layer} -")
        lines.append(f"  {start:>6} | " + " | ".join(f"{o:<12}" for o in owners))
    return lines


def placement(docs: Path) -> str:
    """The same four layers under slots, block-first and field-first, and packed."""
    parts = []
    budget = Budget(num_blocks=4)
    block_first = _hybrid(hnd(CONTENT), budget, "slots")
    field_first = _hybrid(nhd(CONTENT, name="kv_first", order="field_first"), budget, "slots")
    large = _hybrid(hnd(CONTENT), Budget(memory=1), "packed", every=4).configs[0].large_page_bytes
    packed = _hybrid(hnd(CONTENT), Budget(memory=3 * large), "packed", every=4)
    for title, made, what in (
        ("Slots, block-first", block_first, "A block id covers one page in each tensor."),
        ("Slots, field-first", field_first, "A block id covers one piece of the keys' run and one of the values'."),
    ):
        config = made.configs[0]
        page = config.kv_cache_groups[0].page_bytes
        runs = 2 if config.kv_cache_groups[0].layout.field_first else 1
        lines = []
        for tensor in config.kv_cache_tensors:
            sharers = [c.layer for c in tensor.shared_by]
            names = ", ".join(f"L{n}" for n in sharers)
            lines.append(f"tensor at byte {tensor.offset}: {tensor.nbytes} bytes, shared by {names}")
        first = [c.layer for c in config.kv_cache_tensors[0].shared_by]
        lines += ["", "first tensor, byte by byte (left: first byte of the run)"]
        lines += _map(config, first, page // runs, config.num_blocks * runs)
        lines += ["", *_views(config, first)]
        parts.append(f"### {title}\n\n{what}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    config = packed.configs[0]
    lines = [f"{config.num_large_pages} large pages of {config.large_page_bytes} bytes; page 0 belongs to nobody"]
    for group in config.kv_cache_groups:
        layers = ", ".join(map(str, group.cache_ids))
        lines.append(
            f"group {group.index} ({group.spec.kind}: {layers}): ruler of {group.block_stride} bytes, "
            f"{group.blocks_per_large_page} blocks a large page, ids 0 to {group.num_blocks - 1}"
        )
    lines += ["", *_views(config, [0, 1, 3])]
    what = "Here L0 alone keeps every token. Each group measures the whole arena with a ruler of its own."
    parts.append(f"### Packed\n\n{what}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def to_scale(docs: Path) -> str:
    """What `kvcore layout format=svg` draws of five layers, as wide as the page."""
    content = KVHeads(4, 64, dtype="bfloat16")
    caches = {CacheId(i): KVCacheSpec(content, Full() if i == 4 else Window(1024)) for i in range(5)}
    made = plan(caches, {}, Budget(memory=64 << 20), Limits(8192, 512, 8), placement="packed", block_size=16)
    drawn = svg(scene(made.capacity), "five layers, placement packed, 64 MiB")
    return drawn.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)


def smollm2(docs: Path) -> str:
    """What `plan` says of the default model's geometry."""
    content = KVHeads(3, 64, dtype="float32")
    caches = {CacheId(i): KVCacheSpec(content, Full()) for i in range(30)}
    offer = LayoutOffer("torch", (LayoutOption(hnd(content), KernelBlocks(multiple_of=1)),))
    made = plan(caches, dict.fromkeys(caches, offer), Budget(memory=512 << 20), Limits(max_model_len=8192))
    return "```text\n" + made.explain() + "\n```\n"
