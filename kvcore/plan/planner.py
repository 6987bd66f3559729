"""`plan`: specs, layouts, bytes and limits in; one `KVCacheConfig` a rank out. A pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcore.errors import CapacityError, ConfigError, SpecError
from kvcore.plan import explain
from kvcore.plan.capacity import Capacity, Limits
from kvcore.plan.choice import Asked, Considered, config_of, draft
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.device import DeviceTerms
from kvcore.plan.groups import LayoutOffer, classes
from kvcore.plan.stages import RankLayout, on_ranks
from kvcore.settings.key import check, key
from kvcore.settings.units import MOST_BYTES
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.dtypes import dtype


@dataclass(frozen=True)
class Budget:
    """How large the cache is: bytes of the arena, or a number of blocks; exactly one is given."""

    memory: int | None = key(None, "bytes of the arena", least=1, most=MOST_BYTES)
    num_blocks: int | None = key(None, "blocks of the arena, null block included", least=1)

    def __post_init__(self) -> None:
        check(self, "cache")
        if (self.memory is None) == (self.num_blocks is None):
            raise ConfigError(
                "give the arena in bytes or in blocks",
                field="cache.memory",
                got=(self.memory, self.num_blocks),
                allowed="one of cache.memory and cache.num_blocks",
            )


@dataclass(frozen=True)
class Plan:
    """The configs of all ranks, and what they amount to.

    Attributes:
        configs: One a rank, by global rank.
        limits: What was planned for.
        caches: The specs that were planned.
        considered: The placements that were compared, or the one that was asked for.
        device: Where the memory of a device of each stage goes, where the cache is what it leaves.
    """

    configs: tuple[KVCacheConfig, ...]
    limits: Limits
    caches: Mapping[CacheId, KVCacheSpec]
    considered: tuple[Considered, ...] = ()
    device: tuple[DeviceTerms, ...] = ()

    @property
    def capacity(self) -> Capacity:
        """Capacity of the limiting rank: the one whose own memory holds the fewest ids."""
        return Capacity(min(self.configs, key=lambda c: c.own_units), self.limits)

    @property
    def needed_bytes(self) -> int:
        """Arena bytes with which one sequence of `max_model_len` tokens fits, null block included."""
        capacity = self.capacity
        return capacity.arena_bytes(capacity.needed_units(self.limits.max_model_len) + 1)

    @property
    def fits(self) -> bool:
        """Whether one sequence of `max_model_len` tokens fits."""
        return self.capacity.fits(self.limits.max_model_len)

    def require_fit(self) -> None:
        """Raise `CapacityError` unless one sequence of `max_model_len` tokens fits."""
        if not self.fits:
            longest = self.capacity.longest()
            raise CapacityError(
                f"the cache is too small for one sequence of {self.limits.max_model_len} tokens: "
                f"{self.needed_bytes} bytes are needed",
                field="cache.memory",
                got=f"{self.configs[0].total_bytes} bytes",
                allowed=f">= {self.needed_bytes} bytes, or engine.max_model_len <= {longest}",
                remedy=f"set cache.memory={self.needed_bytes} or engine.max_model_len={max(longest, 1)}",
            )

    def as_dict(self, lengths: Sequence[int] = ()) -> dict[str, Any]:
        """The JSON document of `kvcore plan`."""
        return explain.as_dict(self, lengths)

    def explain(self) -> str:
        """The same for people: where every byte goes, and what fits."""
        return explain.text(self)


def plan(
    caches: Mapping[CacheId, KVCacheSpec],
    offers: Mapping[CacheId, LayoutOffer],
    budget: Budget,
    limits: Limits,
    *,
    placement: str = "auto",
    block_size: int | None = None,
    block_size_by_kind: Mapping[str, int] | None = None,
    shared: Mapping[CacheId, CacheId] | None = None,
    ranks: RankLayout | None = None,
) -> Plan:
    """Plan the cache of every rank.

    Args:
        caches: The caches that own bytes.
        offers: Layouts of the chosen backend for each cache; missing means the core's plain layout.
        budget: Size of the arena.
        limits: Longest sequence, step budget.
        placement: ``slots``, ``packed``, or ``auto``: whichever holds more sequences of `max_model_len` tokens.
        block_size: Tokens of a block; None takes the smallest multiple of 16 that a group takes, and under `slots`
            more for the groups of small pages.
        block_size_by_kind: Another block size for the groups of one kind, such as ``{"window": 64}``.
        shared: Caches without bytes, and whose they read.
        ranks: Pipeline stages and tensor ranks; `caches` is then what one tensor rank stores of all layers. None is
            one rank.

    Returns:
        The plan; `fits` tells whether `max_model_len` does, `require_fit` raises if not.

    Raises:
        LayoutError: Layouts or block sizes cannot be combined.
        CapacityError: A view passes what the kernels can address. An arena that is too small is no
            error here: the plan says `fits` false and `require_fit` raises.
    """
    if not caches:
        raise SpecError("there is nothing to plan: the model has no caches", field="caches", got=0)
    if block_size is not None and block_size < 1:
        raise ConfigError("block size must be positive", field="cache.block_size", got=block_size, allowed=">= 1")
    if placement not in ("auto", "slots", "packed"):
        raise ConfigError(
            "unknown placement", field="cache.placement", got=placement, allowed=("auto", "slots", "packed")
        )
    if placement == "packed" and budget.num_blocks is not None:
        raise ConfigError(
            "under placement packed every group counts its own blocks",
            field="cache.num_blocks",
            got=budget.num_blocks,
            allowed="cache.memory=BYTES",
        )
    asked = Asked(placement, block_size, block_size_by_kind, counted=budget.num_blocks is not None)
    made, considered = draft(classes(caches, offers), limits, asked)
    units = made.units(budget.memory or 0) if budget.num_blocks is None else budget.num_blocks
    config = _with_shared(config_of(made, units), shared or {})
    if ranks is None:
        configs: tuple[KVCacheConfig, ...] = (config,)
    else:
        configs = on_ranks(config, ranks, budget.memory)
    for each in configs[:: 1 if ranks is None else ranks.tensor]:
        _check_offsets(each, offers)
    return Plan(configs, limits, caches, considered)


def _with_shared(config: KVCacheConfig, shared: Mapping[CacheId, CacheId]) -> KVCacheConfig:
    groups = list(config.kv_cache_groups)
    for reader, direct in shared.items():
        owner = _owner(reader, direct, shared)
        group = config.group_of(owner)
        if any(reader in g.cache_ids for g in groups):
            raise SpecError(
                "a cache cannot both own bytes and read another's", field="shared", got=f"{reader} of {owner}"
            )
        mine = {**groups[group.index].shared, reader: owner}
        groups[group.index] = replace(groups[group.index], shared=mine)
    return replace(config, kv_cache_groups=tuple(groups))


def _owner(reader: CacheId, direct: CacheId, shared: Mapping[CacheId, CacheId]) -> CacheId:
    """The cache at the end of a chain of readers."""
    owner = direct
    for _ in shared:
        if owner not in shared:
            return owner
        owner = shared[owner]
    raise SpecError("caches share one another in a circle", field="shared", got=f"{reader} of {direct}")


def _check_offsets(config: KVCacheConfig, offers: Mapping[CacheId, LayoutOffer]) -> None:
    """Refuse views whose element offsets pass what the backend's kernels compute (31 or 63 bits)."""
    for group in config.kv_cache_groups:
        if not group.cache_ids:  # of another stage
            continue
        bits = offers.get(group.cache_ids[0], LayoutOffer()).max_offset_bits
        for view in config.field_views(group.cache_ids[0]):
            last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
            elements = last * 8 // max(8, dtype(view.dtype).bits)
            if elements >= 2**bits:
                raise CapacityError(
                    f"field {view.name} of group {group.index} spans {elements} elements, more than the "
                    f"kernels of {group.backend} address",
                    field="max_offset_bits",
                    got=elements,
                    allowed=f"< 2**{bits}",
                    remedy="lower cache.memory, or choose a backend with 63-bit offsets",
                )
