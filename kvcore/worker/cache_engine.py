"""`CacheEngine`: the device arena of one rank, its views, and the block operations before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcore.memory.aliasing import check_disjoint
from kvcore.memory.arena import Arena
from kvcore.memory.copy import copy_blocks, zero_blocks
from kvcore.memory.poison import poison_blocks
from kvcore.memory.views import field_tensors
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.cache_spec import CacheId


class CacheEngine:
    """Owns the bytes. After construction no step allocates cache memory or moves a view.

    Args:
        config: The plan of this rank.
        device: Torch device of the arena.
        zero_new_blocks: Zero every block when it is handed out, for kernels that load unwritten slots.
        poison: Poison content when it dies, and the slots of new blocks until they are written; and prove first
            that no two views share memory.
        memory: Memory that somebody else allocated; see `Arena`.

    Attributes:
        poisoned: Blocks poisoned so far because their content died.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        device: str | torch.device,
        *,
        zero_new_blocks: bool,
        poison: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.arena = Arena(config.total_bytes, device, memory=memory)
        self.zero_new_blocks = zero_new_blocks
        self.poison = poison
        self.poisoned = 0
        self.views: dict[CacheId, Mapping[str, torch.Tensor]] = {}
        for group in config.kv_cache_groups:
            for cache in (*group.cache_ids, *group.shared):
                self.views[cache] = field_tensors(self.arena, config, cache)
        if poison:
            check_disjoint(config, self.views)

    def before_step(
        self,
        copies: Sequence[tuple[int, int, int]],
        new_blocks: Sequence[tuple[int, int]],
        dead: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Block operations of a step, in the order of the design: copy, then zero; poison comes before both.

        Nothing that a step reads is dead when it starts: a block dies after the last step that may read it
        has retired, and a cached one when it is evicted, which is when it is handed out for other content.
        """
        if self.poison:
            self._poison(dead)
            self.poisoned += len(dead)
            # Under its new owner's dtypes: NaN of one type is a number in another.
            self._poison(new_blocks)
        for group in {g for g, _, _ in copies}:
            pairs = [(a, b) for g, a, b in copies if g == group]
            copy_blocks(self.arena, self.config, group, pairs)
        if self.zero_new_blocks:
            # A copy's target is written already; zeroing it would lose the copy.
            targets = {(g, b) for g, _, b in copies}
            for group in {g for g, _ in new_blocks}:
                fresh = [b for g, b in new_blocks if g == group and (g, b) not in targets]
                zero_blocks(self.arena, self.config, group, fresh)

    def _poison(self, blocks: Sequence[tuple[int, int]]) -> None:
        for group in {g for g, _ in blocks}:
            poison_blocks(self.arena, self.config, group, [b for g, b in blocks if g == group])
