"""Binding: every attention layer of the model meets its backend, its facts and its views, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
from kvcore.models.facts import ModelFacts
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.cache_spec import CacheId
from kvcore.worker.forward_context import BoundLayer

log = logging.getLogger("kvcore")
Views = Mapping[CacheId, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Binding:
    """All bound layers of a rank.

    Attributes:
        layers: Bound layers by cache, for the forward context.
        groups: (backend, attention group): metadata is prepared once a step for each.
    """

    layers: Mapping[CacheId, BoundLayer]
    groups: tuple[tuple[AttentionBackend, AttentionGroup], ...]


def bind(
    facts: ModelFacts,
    config: KVCacheConfig,
    views: Views,
    backends: Mapping[str, AttentionBackend],
    parameters: Callable[[CacheId], Mapping[str, torch.Tensor]],
) -> Binding:
    """Bind every cache that attention reads.

    Args:
        facts: The model; gives each cache its query.
        config: The plan of this rank; gives each cache its KV group and backend.
        views: Field views of each cache.
        backends: Backends by name.
        parameters: For a cache, the layer's own tensors: ``sinks``, ``alibi_slopes`` where it has them.
    """
    layers: dict[CacheId, BoundLayer] = {}
    groups: list[tuple[AttentionBackend, AttentionGroup]] = []
    unit: list[str] = []
    queries = facts.queries
    for group in config.kv_cache_groups:
        if group.backend is None:
            continue
        backend = backends[group.backend]
        caches = sorted(c for c in (*group.cache_ids, *group.shared) if c in queries)
        # What a cache stores is the plan's word: `kvcore diff` plans one model for two contents.
        asked = {c: replace(queries[c], content=group.spec.content.kind) for c in caches}
        # Layers of one KV group may still ask unlike things (a mask, a soft-cap): one group for each.
        for query in dict.fromkeys(asked.values()):
            members = []
            for cache in (c for c in caches if asked[c] == query):
                own = {name: t.float() for name, t in parameters(cache).items()}
                if query.quant in ("tensor", "head") and not own.keys() & {"k_scale", "v_scale"}:
                    shape = () if query.quant == "tensor" else (query.num_kv_heads,)
                    one = torch.ones(shape, device=next(iter(views[cache].values())).device)
                    own |= {"k_scale": one, "v_scale": one}
                    unit.append(query.cache_dtype)
                layer = AttentionLayer(cache, query, **own, shared=cache in group.shared)
                layers[cache] = BoundLayer(layer, backend, len(groups), views[cache])
                members.append(layer)
            groups.append((backend, AttentionGroup(group.index, query, tuple(members), group.layout)))
    if unit:
        # Constant scales that neither the checkpoint nor a file brings: 1.0 is right for some models only.
        log.warning(
            "%s caches of %d layers have no scales: 1.0 is used; cache.scales=token_head measures them",
            unit[0],
            len(unit),
        )
    return Binding(layers, tuple(groups))
