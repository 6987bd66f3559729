"""The configs of all ranks out of the plan of the whole model: the same groups and ids on every rank.

Every group is present on every stage, so that one set of block tables serves them all; a stage is charged its own
layers alone, and all ranks count as many ids as the one with the least room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import lcm

from kvcore.errors import ConfigError
from kvcore.plan.config import ARENA_ALIGNMENT, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, slots_bytes
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.dtypes import round_up


@dataclass(frozen=True)
class RankLayout:
    """How ranks share a plan.

    Attributes:
        stages: The layers of each pipeline stage.
        tensor: Ranks of each stage; all hold the same caches, of their own heads.
        memory: Bytes of the arena on the ranks of each stage, from the groups that are there (their tables take bytes
            as well); None where the budget of the plan holds for all.
    """

    stages: Sequence[Collection[int]]
    tensor: int = 1
    memory: Callable[[Sequence[KVCacheConfig]], Sequence[int]] | None = None


def on_ranks(whole: KVCacheConfig, layout: RankLayout, memory: int | None) -> tuple[KVCacheConfig, ...]:
    """One config a rank, by global rank: stage by stage, tensor ranks within.

    Args:
        whole: The plan of all layers on one rank; its groups, block sizes and rulers hold everywhere.
        layout: The ranks.
        memory: Bytes of each rank's arena; None keeps the ids of `whole`.

    Raises:
        ConfigError: A layer reads the cache of a layer on another stage.
    """
    stages = [_Stage(whole, set(layers)) for layers in layout.stages]
    if layout.memory is not None:
        given = layout.memory([stage.config(0) for stage in stages])
        own = [stage.units(room) for stage, room in zip(stages, given, strict=True)]
    elif memory is not None:
        own = [stage.units(memory) for stage in stages]
    else:
        own = [whole.num_blocks] * len(stages)
    count = min(own)
    configs = [stage.config(count) for stage in stages]
    return tuple(
        replace(config, global_rank=stage * layout.tensor + rank, own_units=own[stage])
        for stage, config in enumerate(configs)
        for rank in range(layout.tensor)
    )


class _Stage:
    """One stage's share of every group."""

    def __init__(self, whole: KVCacheConfig, layers: Collection[int]) -> None:
        self._whole = whole
        self._groups = _shared_evenly(whole.kv_cache_groups, layers)
        self._strides = self._slots_strides() if whole.placement == "slots" else []
        self._large = self._large_page() if whole.placement == "packed" else 0

    def units(self, memory: int) -> int:
        """Ids or large pages that `memory` bytes hold."""
        if self._whole.placement == "packed":
            return memory // self._large
        if not self._strides:  # a stage without caches holds any number of them
            return memory
        count = memory // sum(self._strides)
        while count > 0 and slots_bytes(self._strides, count) > memory:
            count -= 1
        return count

    def config(self, count: int) -> KVCacheConfig:
        """The config of so many ids or large pages."""
        if self._whole.placement == "packed":
            groups = tuple(
                replace(
                    g, block_stride=self._large // g.blocks_per_large_page, num_blocks=count * g.blocks_per_large_page
                )
                for g in self._groups
            )
            everyone = tuple(c for g in groups for c in g.cache_ids)
            tensor = KVCacheTensor(0, count * self._large, 0, everyone)
            return KVCacheConfig("packed", 0, groups, (tensor,), count, self._large)
        groups = tuple(
            replace(g, block_stride=max(self._strides[: len(g.cache_ids)], default=0), num_blocks=count)
            for g in self._groups
        )
        tensors, offset = [], 0
        for i, stride in enumerate(self._strides):
            sharers = tuple(g.cache_ids[i] for g in groups if i < len(g.cache_ids))
            tensors.append(KVCacheTensor(offset, stride * count, stride, sharers))
            offset = round_up(offset + stride * count, ARENA_ALIGNMENT)
        return KVCacheConfig("slots", count, groups, tuple(tensors))

    def _slots_strides(self) -> list[int]:
        """Bytes of an id in each tensor: the largest page of the groups that reach it."""
        unit = lcm(*(g.stride_unit for g in self._whole.kv_cache_groups))
        widest = max(len(g.cache_ids) for g in self._groups)
        return [round_up(max(g.page_bytes for g in self._groups if i < len(g.cache_ids)), unit) for i in range(widest)]

    def _large_page(self) -> int:
        """The smallest large page that every group cuts into as many blocks as in the whole plan."""
        step = lcm(ARENA_ALIGNMENT, *(g.blocks_per_large_page * g.stride_unit for g in self._groups))
        need = max(g.blocks_per_large_page * g.page_bytes * len(g.cache_ids) for g in self._groups)
        return round_up(max(need, 1), step)


def _shared_evenly(groups: Sequence[KVCacheGroupSpec], layers: Collection[int]) -> list[KVCacheGroupSpec]:
    """The groups with the caches of some layers: groups alike share evenly what the stage has of their kind."""
    alike: dict[tuple[object, ...], list[KVCacheGroupSpec]] = {}
    for group in groups:
        key = (group.spec, group.backend, group.layout, group.block_size, group.blocks_per_large_page)
        alike.setdefault(key, []).append(group)
    shares: dict[int, tuple[CacheId, ...]] = {}
    for same in alike.values():
        mine = sorted(c for g in same for c in g.cache_ids if c.layer in layers)
        for i, group in enumerate(same):
            shares[group.index] = tuple(mine[i * len(mine) // len(same) : (i + 1) * len(mine) // len(same)])
    owners = {cache: index for index, caches in shares.items() for cache in caches}
    readers: dict[int, dict[CacheId, CacheId]] = {group.index: {} for group in groups}
    for group in groups:
        for reader, owner in group.shared.items():
            if (reader.layer in layers) != (owner.layer in layers):
                raise ConfigError(
                    "a layer reads the cache of a layer on another stage",
                    field="parallel.pipeline",
                    got=f"{reader} of {owner}",
                    allowed="stages that keep layers that share a cache together, such as 1",
                )
            if owner in owners:
                readers[owners[owner]][reader] = owner
    return [replace(g, cache_ids=shares[g.index], shared=readers[g.index]) for g in groups]
