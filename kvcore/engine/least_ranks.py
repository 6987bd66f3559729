"""The fewest ranks on which a model fits a device: what `plan` proposes, and never chooses by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvcore.engine.planning import known_weights, prepare_plan
from kvcore.engine.settings import EngineSettings
from kvcore.errors import KVCoreError
from kvcore.plan.ranks import Ranks
from kvcore.registry.registry import Registry

# Tensor ranks want the fast links within one machine.
MOST_TENSOR = 8


def least_ranks(settings: EngineSettings, registry: Registry) -> Ranks | None:
    """The least `parallel.tensor` up to 8, else 8 and the fewest stages, with which one sequence fits.

    Args:
        settings: What did not fit, on as many ranks as it asked for.
        registry: Installed plugins.

    Returns:
        The ranks, or None where no number of them helps.
    """
    for ranks in _candidates(settings):
        tried = replace(settings, ranks=ranks)
        if not _weights_fit(tried):
            continue
        try:
            found, _ = prepare_plan(tried, registry, purpose="plan")
        except KVCoreError:  # these ranks cannot share the model, or its layers
            continue
        if found.fits:
            return ranks
    return None


def _candidates(settings: EngineSettings) -> Iterator[Ranks]:
    """In the order in which they are proposed."""
    facts = settings.facts
    specs = {c.cache_id: c.spec for c in facts.caches}
    heads = [c.query.num_heads for c in facts.caches if c.query is not None]
    allowed = []
    for tensor in range(1, MOST_TENSOR + 1):
        try:
            Ranks(tensor).specs(specs, heads)
        except KVCoreError:
            continue
        allowed.append(tensor)
        yield Ranks(tensor)
    for pipeline in range(2, facts.num_layers + 1):
        yield Ranks(allowed[-1], pipeline)


def _weights_fit(settings: EngineSettings) -> bool:
    """Whether the weights alone leave anything: cheaper to ask than a plan."""
    ranks, usable = settings.ranks, int(settings.device.memory_bytes * settings.cache.utilization)
    weights, stages = known_weights(settings), ranks.stages(settings.facts.num_layers)
    return all(
        weights.on_rank(layers, stage, len(stages), ranks.tensor) < usable for stage, layers in enumerate(stages)
    )
