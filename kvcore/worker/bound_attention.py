"""`BoundAttention`: every attention layer with its backend, its facts and its views, bound once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch
from kvcore.attention.query import AttentionQuery
from kvcore.errors import IntegrityError
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.cache_spec import CacheId

log = logging.getLogger("kvcore")
Views = Mapping[CacheId, Mapping[str, torch.Tensor]]
# For a cache, the layer's own tensors: ``sinks``, ``alibi_slopes``, ``k_scale``, ``v_scale`` where it has them.
Parameters = Callable[[CacheId], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class BoundLayer:
    """A layer, its backend and its views, bound before the first step.

    Attributes:
        layer: Facts and parameters of the layer.
        backend: Who serves it.
        attention_group: Index of its attention group.
        cache: Field views into the arena; the same objects as in the runner's list.
    """

    layer: AttentionLayer
    backend: AttentionBackend
    attention_group: int
    cache: Mapping[str, torch.Tensor]


class BoundAttention:
    """All bound layers of a rank; routes writes and queries of a step to their backends.

    Args:
        layers: Bound layers by cache.
        groups: (backend, attention group): metadata is prepared once a step for each.

    Attributes:
        layers, groups: The same.
    """

    def __init__(
        self, layers: Mapping[CacheId, BoundLayer], groups: tuple[tuple[AttentionBackend, AttentionGroup], ...]
    ) -> None:
        self.layers, self.groups = layers, groups
        self._batch: Batch | None = None
        self._metadata: list[Any] = []

    def begin(self, batch: Batch) -> None:
        """Start a step: the metadata of every attention group is prepared."""
        self._metadata = [backend.prepare(batch, group) for backend, group in self.groups]
        self._batch = batch

    @property
    def batch(self) -> Batch:
        """The step that has begun.

        Raises:
            IntegrityError: None has.
        """
        if self._batch is None:
            raise IntegrityError("attention was called outside a step", field="batch", got=None)
        return self._batch

    def write(self, cache_id: CacheId, key_TKD: torch.Tensor, value_TKDv: torch.Tensor) -> None:
        """Store the step's keys and values of a layer; one that reads another layer's cache stores nothing.

        Raises:
            IntegrityError: No step has begun, or the cache is none of this rank's.
        """
        bound = self._bound(cache_id)
        if not bound.layer.shared:
            bound.backend.write(
                bound.layer, {"k": key_TKD, "v": value_TKDv}, bound.cache, self._metadata[bound.attention_group]
            )

    def attend(
        self,
        cache_id: CacheId,
        query_THD: torch.Tensor,
        out_THD: torch.Tensor | None = None,
        lse_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's queries over all that the layer may see.

        Args:
            cache_id: The layer's cache.
            query_THD: [T, H, D].
            out_THD: [T, H, Dv] to write into; made in the dtype of the queries when None.
            lse_TH: float32 [T, H] to write the log-sum-exp into, where it is wanted.

        Returns:
            `out_THD`.

        Raises:
            IntegrityError: As `write`.
        """
        bound = self._bound(cache_id)
        if out_THD is None:
            out_THD = query_THD.new_empty(*query_THD.shape[:2], bound.layer.query.head_dim_v)
        metadata = self._metadata[bound.attention_group]
        bound.backend.attend(bound.layer, {"q": query_THD}, bound.cache, metadata, out_THD, lse_TH)
        return out_THD

    def _bound(self, cache_id: CacheId) -> BoundLayer:
        _ = self.batch
        if cache_id not in self.layers:
            known = ", ".join(map(str, sorted(self.layers)))
            raise IntegrityError("no attention is bound to this cache", field="layer", got=str(cache_id), allowed=known)
        return self.layers[cache_id]


def bind(
    queries: Mapping[CacheId, AttentionQuery],
    config: KVCacheConfig,
    views: Views,
    backends: Mapping[str, AttentionBackend],
    parameters: Parameters,
) -> BoundAttention:
    """Bind every cache that attention reads.

    Args:
        queries: What attention asks of each cache.
        config: The plan of this rank; gives each cache its KV group and backend.
        views: Field views of each cache.
        backends: Backends by name.
        parameters: Each layer's own tensors.
    """
    layers: dict[CacheId, BoundLayer] = {}
    groups: list[tuple[AttentionBackend, AttentionGroup]] = []
    unit: list[str] = []
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
    return BoundAttention(layers, tuple(groups))
