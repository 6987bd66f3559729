"""From settings to a plan: backends first, then layouts, blocks and bytes together. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcore.attention.query import AttentionQuery
from kvcore.engine.settings import CacheSettings, EngineSettings
from kvcore.errors import BackendUnsupportedError, ConfigError, ModelError, NotBuiltError
from kvcore.manage.policies.eviction import BUILT_IN, EvictionPolicy
from kvcore.models.parameters.shares import StoredWeights
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.device import GRAPHS, DeviceTerms, activation_bytes, table_bytes
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.plan.stages import RankLayout
from kvcore.registry.registry import Registry
from kvcore.registry.select import Purpose, Selection, choose_backends
from kvcore.spec.content import shared_out

# On a CPU device the cache competes with everything else on the machine.
CPU_SHARE = 4
CPU_MOST = 4 << 30


def select(settings: EngineSettings, registry: Registry, *, purpose: Purpose, strict: bool = True) -> Selection:
    """Choose backends for settings; see `choose_backends`."""
    facts, cache = settings.facts, settings.cache
    try:
        return choose_backends(
            facts.owned,
            facts.queries,
            settings.device,
            settings.backend,
            registry,
            purpose=purpose,
            shared=facts.shared,
            block_size=cache.tokens_a_block,
            block_first_only=cache.placement == "packed",
            strict=strict,
        )
    except BackendUnsupportedError as error:
        if any(spec.kind == "latent" for spec in facts.owned.values()):
            error.remedy = f"{error.remedy}; or set cache.mla=expanded to cache keys and values of every head"
        raise


def prepare_plan(
    settings: EngineSettings, registry: Registry, *, purpose: Purpose, memory_bytes: int | None = None
) -> tuple[Plan, Selection]:
    """Choose backends and plan the cache for them.

    Args:
        settings: What to plan for.
        registry: Installed plugins.
        purpose: ``run``, or ``plan`` (a library missing here does not count).
        memory_bytes: Bytes left for the cache as measured; None takes what the device leaves (`device_terms`), or on a
            CPU the rule of `cpu_cache_bytes`. `cache.memory` and `cache.num_blocks` win over both.

    Returns:
        The plan, which may not fit (`Plan.require_fit`), and the selection behind it.

    Raises:
        BackendError, PluginError, LayoutError, CapacityError, ConfigError: As they say.
    """
    cache = settings.cache
    settings = on_one_rank(settings)
    if purpose == "run" and settings.ranks.count > 1:
        raise NotBuiltError(
            "several ranks can be planned, but not run yet",
            field="parallel.tensor" if settings.ranks.tensor > 1 else "parallel.pipeline",
            got=settings.ranks.count,
            allowed=1,
            remedy="use one rank",
        )
    selection = select(settings, registry, purpose=purpose)
    if cache.memory is not None or cache.num_blocks is not None:
        return _plan(settings, selection, Budget(cache.bytes_in_all, cache.num_blocks)), selection
    if memory_bytes is not None:
        return _plan(settings, selection, Budget(memory_bytes)), selection
    if settings.device.kind == "cpu":
        return _plan(settings, selection, Budget(cpu_cache_bytes())), selection
    terms: list[DeviceTerms] = []

    def left(configs: Sequence[KVCacheConfig]) -> list[int]:
        terms.extend(device_terms(settings, configs, allowances=purpose == "plan"))
        return [max(0, t.left) for t in terms]

    found = _plan(settings, selection, Budget(1), left)
    arenas = [c.total_bytes for c in found.configs[:: settings.ranks.tensor]]
    device = tuple(replace(t, arena=arena) for t, arena in zip(terms, arenas, strict=True))
    return replace(found, device=device), selection


def on_one_rank(settings: EngineSettings) -> EngineSettings:
    """The settings with what one tensor rank stores of each cache.

    Raises:
        ConfigError: The model cannot be shared out to so many ranks.
    """
    facts, ranks = settings.facts, settings.ranks
    ranks.stages(facts.num_layers)
    if ranks.count == 1 and ranks.decode_context == 1:
        return settings
    specs = ranks.specs(
        {c.cache_id: c.spec for c in facts.caches}, [c.query.num_heads for c in facts.caches if c.query is not None]
    )
    caches = tuple(
        replace(c, spec=specs[c.cache_id], query=None if c.query is None else _rank_query(c.query, ranks.tensor))
        for c in facts.caches
    )
    return replace(settings, facts=replace(facts, caches=caches))


def _rank_query(query: AttentionQuery, tensor: int) -> AttentionQuery:
    """The attention of one rank's heads."""
    kv_heads = query.num_kv_heads if query.content == "latent" else shared_out("KV heads", query.num_kv_heads, tensor)
    return replace(query, num_heads=query.num_heads // tensor, num_kv_heads=kv_heads)


def _plan(
    settings: EngineSettings,
    selection: Selection,
    budget: Budget,
    memory: Callable[[Sequence[KVCacheConfig]], Sequence[int]] | None = None,
) -> Plan:
    limits, ranks, facts = settings.engine, settings.ranks, settings.facts
    # A window that no sequence can outgrow is full attention: one table with the full layers, and no step reserve.
    owned = {
        cache: replace(spec, retention=spec.retention.within(limits.max_model_len))
        for cache, spec in facts.owned.items()
    }
    return plan(
        owned,
        selection.offers,
        budget,
        limits,
        placement=settings.cache.placement,
        block_size=settings.cache.tokens_a_block,
        block_size_by_kind=settings.cache.tokens_a_block_by_kind,
        shared=facts.shared,
        ranks=RankLayout(ranks.stages(facts.num_layers), ranks.tensor, memory),
    )


def device_terms(
    settings: EngineSettings, configs: Sequence[KVCacheConfig], *, allowances: bool = True
) -> list[DeviceTerms]:
    """Where the memory of a device of each stage goes, without the cache itself.

    Args:
        settings: Device, weights, limits and ranks.
        configs: Of each stage, in any size, for its tables.
        allowances: Whether activations and graphs are allowed for; a run measures them once the weights are loaded.

    Raises:
        ConfigError, ModelError: Nothing tells the size of the device or of the weights.
    """
    device, facts, ranks = settings.device, settings.facts, settings.ranks
    if device.memory_bytes < 1:
        raise ConfigError(
            "the memory of the device is not known",
            field="cache.memory",
            got=None,
            allowed="bytes, such as 2GiB",
            remedy="set cache.memory",
        )
    weights = known_weights(settings)
    stages = ranks.stages(facts.num_layers)
    activations = activation_bytes(settings.engine, facts.hidden_size, facts.vocab_size, facts.dtype)
    return [
        DeviceTerms(
            total=device.memory_bytes,
            reserve=device.memory_bytes - int(device.memory_bytes * settings.cache.utilization),
            weights=weights.on_rank(layers, stage, len(stages), ranks.tensor),
            activations=activations if allowances else 0,
            graphs=GRAPHS if allowances else 0,
            tables=table_bytes(configs[stage], settings.engine),
        )
        for stage, layers in enumerate(stages)
    ]


def known_weights(settings: EngineSettings) -> StoredWeights:
    """The weights, where something tells their bytes.

    Raises:
        ModelError: Nothing does; says what is missing.
    """
    if isinstance(settings.weights, StoredWeights):
        return settings.weights
    raise settings.weights or ModelError(
        "nothing tells how many bytes the weights take",
        field="model.weight_bytes",
        got=None,
        allowed="bytes, such as 14GiB",
        remedy="set model.weight_bytes, or give the cache itself: cache.memory=BYTES",
    )


def check_run(settings: EngineSettings, registry: Registry) -> None:
    """Raise whatever `run` would refuse, before weights are fetched or torch is loaded.

    Raises:
        UnsupportedModelError: The architecture cannot be served correctly.
        KVCoreError: As `prepare_plan` and `Plan.require_fit` say.
    """
    settings.facts.require_runnable(settings.engine.max_model_len)
    first, _ = prepare_plan(settings, registry, purpose="run")
    first.require_fit()


def eviction_policy(cache: CacheSettings, registry: Registry) -> type[EvictionPolicy]:
    """The class of the policy that `cache.eviction` names.

    Raises:
        ConfigError: Neither the core nor an installed plugin offers it.
    """
    known: dict[str, type[EvictionPolicy]] = {**BUILT_IN, **registry.eviction_policies}
    if cache.eviction not in known:
        raise ConfigError(
            "no installed plugin offers this eviction policy",
            field="cache.eviction",
            got=cache.eviction,
            allowed=sorted(known),
        )
    return known[cache.eviction]


def cpu_cache_bytes(available_bytes: int | None = None) -> int:
    """Bytes of the cache on a CPU where the user gives none: a quarter of the available memory, at most 4 GiB.

    Args:
        available_bytes: Available memory of the machine; read when None is given.
    """
    if available_bytes is None:
        import psutil  # late: only this rule needs it

        available_bytes = int(psutil.virtual_memory().available)
    return max(1, min(available_bytes // CPU_SHARE, CPU_MOST))
