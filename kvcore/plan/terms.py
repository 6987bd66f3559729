"""Where the bytes of an arena go: terms that add up to it, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvcore.plan.capacity import Capacity


@dataclass(frozen=True)
class Term:
    """One part of an arena.

    Attributes:
        name: ``null`` (block 0, or large page 0), ``payload``, ``padding`` (alignment, and pages smaller than their
            place), ``begun`` (the rest of begun large pages), ``step`` (kept free for a step), ``left``
            (too little for one more sequence) or ``between`` (from the end of a tensor to the next multiple of 256).
        group: The KV group of payload and padding, else None.
        nbytes: Its bytes.
    """

    name: str
    group: int | None
    nbytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"term": self.name, "group": self.group, "bytes": self.nbytes}


def arena_terms(capacity: Capacity) -> list[Term]:
    """The arena of one rank, filled with as many whole sequences of `max_model_len` tokens as it holds.

    Payload is what the fields of held blocks take; a last block that is not full counts as a whole one.
    """
    config, unit = capacity.config, capacity.unit_bytes
    sequences = capacity.simultaneous(capacity.limits.max_model_len)
    held = [sequences * h for h in capacity.resident(capacity.limits.max_model_len)]
    taken = capacity.units(held)
    kept = capacity.units([h + k for h, k in zip(held, capacity.reserve(sequences), strict=True)]) - taken
    kept = min(kept, capacity.usable - taken) if sequences else 0
    null = min(1, capacity.total)
    terms = [Term("null", None, null * unit)]
    blocks = 0
    for group, count in zip(config.kv_cache_groups, held, strict=True):
        place = group.block_stride if config.placement == "packed" else unit
        payload = count * group.layout.payload_bytes * group.ratio * len(group.cache_ids)
        terms += [Term("payload", group.index, payload), Term("padding", group.index, count * place - payload)]
        blocks += count * place
    terms += [
        Term("begun", None, taken * unit - blocks),
        Term("step", None, kept * unit),
        Term("left", None, (capacity.usable - taken - kept) * unit),
        Term("between", None, config.total_bytes - capacity.total * unit),
    ]
    return [t for t in terms if t.nbytes or t.name == "null"]


def remedies(capacity: Capacity, needed_bytes: int | None) -> list[dict[str, Any]]:
    """What to change so that one sequence of `max_model_len` tokens fits; empty where it does.

    Args:
        capacity: Of the limiting rank.
        needed_bytes: Bytes with which it fits; None where a device has no more to give.
    """
    limits = capacity.limits
    if capacity.fits(limits.max_model_len):
        return []
    found: list[dict[str, Any]] = []
    if needed_bytes is not None:
        found.append({"key": "cache.memory", "value": needed_bytes})
    longest = capacity.longest()
    if longest:
        found.append({"key": "engine.max_model_len", "value": longest})
    fewer = limits.max_num_batched_tokens // 2
    while fewer and not Capacity(capacity.config, replace(limits, max_num_batched_tokens=fewer)).fits(
        limits.max_model_len
    ):
        fewer //= 2
    if fewer:
        found.append({"key": "engine.max_num_batched_tokens", "value": fewer})
    return found
