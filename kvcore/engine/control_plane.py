"""From settings and a plan to the manager and the scheduler that serve them. No torch: a replay needs no model."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from kvcore.engine.planning import eviction_policy
from kvcore.engine.scheduler import Scheduler
from kvcore.engine.settings import EngineSettings
from kvcore.manage.manager import KVCacheManager
from kvcore.plan.config import KVCacheConfig
from kvcore.registry.registry import Registry


def make_manager(settings: EngineSettings, config: KVCacheConfig, registry: Registry) -> KVCacheManager:
    """The manager of one rank's blocks, as `cache.*` asks for it."""
    cache = settings.cache
    prints = [g.layout.fingerprint for g in config.kv_cache_groups]
    namespace = "/".join([settings.facts.architecture, settings.model_path or "", *prints])
    return KVCacheManager(
        config,
        prefix_caching=cache.prefix_caching,
        partial_reuse=cache.reuses_parts(g.block_size for g in config.kv_cache_groups),
        hash_name=cache.hash,
        namespace=namespace.encode(),
        eviction=eviction_policy(cache, registry),
        explain=cache.explain,
        explain_history=cache.explain_history,
        events=cache.events,
        track_dead=cache.sanitize,
    )


def make_scheduler(
    settings: EngineSettings, config: KVCacheConfig, manager: KVCacheManager, eos_token_ids: Iterable[int] = ()
) -> Scheduler:
    """The scheduler over a manager, within the limits `engine.*`."""
    sizes = [g.block_size for g in config.kv_cache_groups]
    return Scheduler(
        manager,
        max_model_len=settings.engine.max_model_len,
        max_num_seqs=settings.engine.max_num_seqs,
        max_num_batched_tokens=settings.engine.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
        salt=settings.cache.salt,
        hit_unit=lcm(*sizes) if settings.cache.prefix_caching else 0,
        explain=settings.cache.explain,
    )
