"""From settings to a plan: backends first, then layouts, blocks and bytes together. No torch."""

from __future__ import annotations

from dataclasses import replace

from kvcore.engine.settings import CacheSettings, EngineSettings
from kvcore.errors import BackendUnsupportedError, CapacityError, ConfigError, NotBuiltError
from kvcore.manage.eviction import EvictionPolicy
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.registry.registry import Registry
from kvcore.registry.select import Purpose, Selection, choose_backends

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
            block_size_by_kind=cache.tokens_a_block_by_kind,
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
        memory_bytes: Bytes left for the cache as measured; None takes the rule of `default_cache_bytes`.
            `cache.memory` and `cache.num_blocks` win over both.

    Returns:
        The plan, which may not fit (`Plan.require_fit`), and the selection behind it.

    Raises:
        BackendError, PluginError, LayoutError, CapacityError, ConfigError: As they say.
    """
    cache = settings.cache
    if purpose == "run" and cache.placement == "packed":
        raise NotBuiltError(
            "placement packed can be planned, but not run: its manager is not built yet",
            field="cache.placement",
            got="packed",
            allowed=("auto", "slots"),
            remedy="use cache.placement=slots",
        )
    selection = select(settings, registry, purpose=purpose)
    if cache.memory is not None or cache.num_blocks is not None:
        budget = Budget(cache.bytes_in_all, cache.num_blocks)
    else:
        budget = Budget(default_cache_bytes(settings) if memory_bytes is None else memory_bytes)
    limits = settings.engine
    # A window that no sequence can outgrow is full attention: one table with the full layers, and no step reserve.
    owned = {
        cache: replace(spec, retention=spec.retention.within(limits.max_model_len))
        for cache, spec in settings.facts.owned.items()
    }
    result = plan(
        owned,
        selection.offers,
        budget,
        limits,
        # Until there is a manager for it, a run does not choose `packed` by itself.
        placement="slots" if purpose == "run" else cache.placement,
        block_size=cache.tokens_a_block,
        block_size_by_kind=cache.tokens_a_block_by_kind,
        shared=settings.facts.shared,
    )
    return result, selection


def check_run(settings: EngineSettings, registry: Registry) -> None:
    """Raise whatever `run` would refuse, before weights are fetched or torch is loaded.

    Raises:
        UnsupportedModelError: The architecture cannot be served correctly.
        KVCoreError: As `prepare_plan` and `Plan.require_fit` say.
    """
    settings.facts.require_runnable(settings.engine.max_model_len)
    first, _ = prepare_plan(settings, registry, purpose="run")
    first.require_fit()


def eviction_policy(cache: CacheSettings, registry: Registry) -> type[EvictionPolicy] | None:
    """The class of the policy that `cache.eviction` names; None for the manager's own.

    Raises:
        ConfigError: No installed plugin offers it.
    """
    name, known = cache.eviction, registry.eviction_policies
    if name == "lru":
        return None
    if name not in known:
        raise ConfigError(
            "no installed plugin offers this eviction policy",
            field="cache.eviction",
            got=name,
            allowed=["lru", *sorted(known)],
        )
    return known[name]


def default_cache_bytes(settings: EngineSettings, available_bytes: int | None = None) -> int:
    """Bytes of the cache where neither `cache.memory` nor `cache.num_blocks` is given.

    On a CPU a quarter of the available memory, at most 4 GiB; elsewhere `cache.utilization` of the
    device's memory less the weights (a running engine measures instead, and passes what it measured).

    Args:
        settings: Device, weights and utilization.
        available_bytes: Available memory of the machine; read when None is given.

    Raises:
        ConfigError: Nothing tells the size of the device or of the weights.
        CapacityError: The weights alone fill the device.
    """
    device = settings.device
    if device.kind == "cpu":
        if available_bytes is None:
            import psutil  # late: only this rule needs it

            available_bytes = int(psutil.virtual_memory().available)
        return max(1, min(available_bytes // CPU_SHARE, CPU_MOST))
    if device.memory_bytes < 1:
        raise ConfigError(
            "the memory of the device is not known",
            field="cache.memory",
            got=None,
            allowed="bytes, such as 2GiB",
            remedy="set cache.memory",
        )
    weights = settings.facts.weight_bytes
    if weights is None:
        raise ConfigError(
            "nothing tells how many bytes the weights take",
            field="model.weight_bytes",
            got=None,
            allowed="bytes, such as 14GiB",
            remedy="set model.weight_bytes, or give the cache itself: cache.memory=BYTES",
        )
    left = int(device.memory_bytes * settings.cache.utilization) - weights
    if left < 1:
        raise CapacityError(
            "the weights alone fill the device: nothing is left for the cache",
            field="device",
            got=f"{device.name}: {device.memory_bytes} bytes x {settings.cache.utilization}",
            allowed=f"> {weights} bytes",
            remedy="choose a larger device or a smaller model.dtype",
        )
    return left
