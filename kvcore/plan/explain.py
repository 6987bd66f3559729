"""The plan as data for scripts and as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcore.plan.config import KVCacheGroupSpec
from kvcore.plan.terms import Term, arena_terms, remedies
from kvcore.spec.cache_spec import shown
from kvcore.spec.retention import Encoder

if TYPE_CHECKING:
    from kvcore.plan.planner import Plan

SMALLEST_LENGTH = 1024


def size(nbytes: float) -> str:
    """Bytes with a binary unit, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def default_lengths(max_model_len: int) -> list[int]:
    """Powers of two from 1,024 up to `max_model_len`, and `max_model_len` itself."""
    lengths, length = [], SMALLEST_LENGTH
    while length < max_model_len:
        lengths.append(length)
        length *= 2
    return [*lengths, max_model_len]


def waste_fraction(plan: Plan) -> float:
    """Share of a full-length sequence's blocks that no field uses: alignment and unlike pages."""
    capacity, payload = plan.capacity, 0
    blocks = capacity.resident(plan.limits.max_model_len)
    for group, held in zip(capacity.config.kv_cache_groups, blocks, strict=True):
        payload += held * group.layout.payload_bytes * group.ratio * len(group.cache_ids)
    if capacity.config.placement == "packed":
        strides = [g.block_stride for g in capacity.config.kv_cache_groups]
        taken = sum(b * s for b, s in zip(blocks, strides, strict=True))
    else:
        taken = sum(blocks) * capacity.unit_bytes
    return 1 - payload / taken if taken else 0.0


def _group_dict(group: KVCacheGroupSpec, held: int) -> dict[str, Any]:
    return {
        "kind": group.spec.kind,
        "backend": group.backend,
        "layout": group.layout.layout.name,
        "layers": [str(c) for c in group.cache_ids],
        "block_size": group.block_size,
        "kernel_block_size": group.kernel_block_size,
        "page_bytes": group.page_bytes,
        "block_stride": group.block_stride,
        "num_blocks": group.num_blocks,
        "blocks_per_large_page": group.blocks_per_large_page or None,
        "blocks_per_request": held,
    }


def as_dict(plan: Plan, lengths: Sequence[int] = ()) -> dict[str, Any]:
    """What `kvcore plan output=json` prints."""
    capacity, limits = plan.capacity, plan.limits
    config, longest = capacity.config, limits.max_model_len
    packed = config.placement == "packed"
    unit = "num_large_pages" if packed else "num_blocks"
    held = capacity.resident(longest)
    return {
        "placement": config.placement,
        "num_blocks": None if packed else config.num_blocks,
        "num_large_pages": config.num_large_pages if packed else None,
        "large_page_bytes": config.large_page_bytes if packed else None,
        "bytes_per_block": None if packed else capacity.unit_bytes,
        "total_bytes": config.total_bytes,
        "bytes_per_token": bytes_per_token(plan),
        "max_model_len": longest,
        "max_concurrency": capacity.simultaneous(longest),
        "tokens": int(capacity.concurrency(longest) * longest),
        "simultaneous": {str(n): capacity.simultaneous(n) for n in sorted(lengths or default_lengths(longest))},
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "max_model_len_fits": capacity.longest(),
        "waste_fraction": waste_fraction(plan),
        "groups": [_group_dict(g, h) for g, h in zip(config.kv_cache_groups, held, strict=True)],
        "tensors": [{"bytes": t.nbytes, "shared_by": [str(c) for c in t.shared_by]} for t in config.kv_cache_tensors],
        "ranks": [
            {"rank": c.global_rank, unit: c.num_large_pages if packed else c.num_blocks, "limiting": c is config}
            for c in plan.configs
        ],
        "arena": [term.as_dict() for term in arena_terms(capacity)],
        "considered": [asdict(c) for c in plan.considered],
        "remedies": _remedies(plan),
        "explain": text(plan),
    }


def bytes_per_token(plan: Plan) -> int | float:
    """Bytes that one decoded token adds in all caches while all keep it.

    States, padding, and the caches of an encoder's tokens (written once, whatever is decoded) are not counted.
    """
    return sum(s.bytes_per_token for s in plan.caches.values() if not isinstance(s.retention, Encoder))


def text(plan: Plan) -> str:
    """A breakdown in which every number can be recomputed from the lines above it."""
    capacity, limits = plan.capacity, plan.limits
    config, longest = capacity.config, limits.max_model_len
    packed = config.placement == "packed"
    unit = "large page" if packed else "block"
    lines = [
        f"placement {config.placement}: {size(config.total_bytes)} = {capacity.total} {unit}s of "
        f"{size(capacity.unit_bytes)}, one of them the null {unit}",
        f"one token adds {bytes_per_token(plan)} bytes while every layer keeps it",
    ]
    held, peak, kept = capacity.resident(longest), capacity.step_peak(longest), capacity.reserve()
    for group, h, p, k in zip(config.kv_cache_groups, held, peak, kept, strict=True):
        per = f", {group.blocks_per_large_page} a large page" if packed else ""
        kernel = f" ({group.ratio} kernel blocks of {group.kernel_block_size})" if group.ratio > 1 else ""
        lines.append(
            f"group {group.index} {group.spec.kind}: {len(group.cache_ids)} layers ({shown(group.cache_ids)}), "
            f"{group.backend or 'no backend: plain layout'} {group.layout.layout.name}, "
            f"block of {group.block_size} tokens{kernel}, page {group.page_bytes} bytes{per}; "
            f"a sequence of {longest} tokens holds {h} blocks, {p} in its largest step; step reserve {k}"
        )
    lines.append(f"padding: {waste_fraction(plan):.2%} of a full-length sequence's blocks")
    units = f"{capacity.needed_units(longest)} {unit}s and the null {unit}"
    verdict = "it fits" if plan.fits else f"it does NOT fit; at most {capacity.longest()} tokens do"
    lines.append(f"one sequence of {longest} tokens needs {units}: {size(plan.needed_bytes)}; {verdict}")
    at_once = capacity.simultaneous(longest)
    lines.append(
        f"at once, step reserve kept free: {at_once} sequences of {longest} tokens "
        f"({capacity.concurrency(longest):.2f} before rounding)"
    )
    lines += [_where(arena_terms(capacity), at_once), *_considered(plan)]
    changes = [f"{change['key']}={change['value']}" for change in _remedies(plan)]
    if changes:
        lines.append(f"to make it fit, any of: {', '.join(changes)}")
    return "\n".join(lines)


def _remedies(plan: Plan) -> list[dict[str, Any]]:
    """What to change; a cache that is what a device leaves cannot be given more."""
    return remedies(plan.capacity, None if plan.device else plan.needed_bytes)


_WORDS = {
    "payload": "fields",
    "padding": "padding",
    "begun": "the rest of begun large pages",
    "step": "step reserve",
    "left": "left over",
    "between": "between tensors",
}


def _where(terms: Sequence[Term], sequences: int) -> str:
    """Every byte of the arena in one line."""
    found: dict[str, int] = {}
    for term in terms:
        where = f" of group {term.group}" if term.group is not None else ""
        found[_WORDS.get(term.name, "the null block") + where] = term.nbytes
    parts = " + ".join(f"{nbytes} {what}" for what, nbytes in found.items())
    return f"bytes with {sequences} whole sequences: {parts}"


def _considered(plan: Plan) -> list[str]:
    """What else the caches could have been planned as, and what that holds."""
    if len(plan.considered) < 2:
        return []
    taken = plan.capacity.config.placement
    said = []
    for c in plan.considered:
        figures = f"{c.sequences:.2f} sequences in {c.groups} groups, {size(c.needed_bytes)} for one"
        mark = " (taken)" if c.placement == taken else ""
        said.append(f"{c.placement}{mark}: {figures if c.refused is None else f'not possible: {c.refused}'}")
    arena = next(c.reference_bytes for c in plan.considered if c.refused is None)
    return [f"considered, in an arena of {size(arena)}: {'; '.join(said)}"]
