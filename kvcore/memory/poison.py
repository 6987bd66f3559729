"""Poison: values that a correct program never uses, written where nobody may read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.memory.arena import Arena
from kvcore.memory.copy import check_blocks
from kvcore.memory.staging import uploaded
from kvcore.memory.views import field_tensors
from kvcore.plan.config import KVCacheConfig

# Bit patterns by dtype name: a quiet NaN where the type has one, else its most extreme code.
CODES: dict[str, tuple[torch.dtype, int]] = {
    "float64": (torch.int64, 0x7FF8_0000_0000_0000),
    "float32": (torch.int32, 0x7FC0_0000),
    "float16": (torch.int16, 0x7E00),
    "bfloat16": (torch.int16, 0x7FC0),
    "fp8_e4m3": (torch.int8, 0x7F),
    "fp8_e5m2": (torch.int8, 0x7F),
    "int8": (torch.int8, -128),
    "int4": (torch.int8, -120),  # 0x88: both halves are -8
    "uint8": (torch.int8, -1),
    "int32": (torch.int32, -(2**31)),
    "int64": (torch.int64, -(2**63)),
}


def poison_blocks(arena: Arena, config: KVCacheConfig, group: int, blocks: Sequence[int]) -> None:
    """Poison every field of blocks of one group, in all its layers: for blocks that were just freed.

    Args:
        arena: The bytes.
        config: Their plan.
        group: Index of the KV group.
        blocks: Manager block ids.

    Raises:
        IntegrityError: An id is out of range, or a null block (those stay zero for ever).
    """
    if not blocks:
        return
    spec = config.kv_cache_groups[group]
    check_blocks(spec, blocks)
    kernel = [b * spec.ratio + j for b in blocks for j in range(spec.ratio)]
    ids = uploaded(kernel, arena.device)
    for cache in spec.cache_ids:
        tensors = field_tensors(arena, config, cache)
        for place in spec.layout.places:
            integer, code = CODES[place.dtype]
            tensors[place.name].view(integer).index_fill_(0, ids, code)
