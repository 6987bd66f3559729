"""Poison: values that a correct program never uses, written where nobody may read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.memory.arena import Arena
from kvcore.memory.copy import check_blocks
from kvcore.memory.staging import uploaded
from kvcore.memory.views import field_tensors
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.dtypes import dtype

# Integers as wide as an element, by its bits; packed types are written by the byte.
_INTEGERS = {64: torch.int64, 32: torch.int32, 16: torch.int16, 8: torch.int8, 4: torch.int8}


def poison_of(name: str) -> tuple[torch.dtype, int]:
    """The integer dtype that views of dtype `name` are poisoned through, and the bit pattern."""
    found = dtype(name)
    return _INTEGERS[found.bits], found.poison


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
            integer, code = poison_of(place.dtype)
            tensors[place.name].view(integer).index_fill_(0, ids, code)
