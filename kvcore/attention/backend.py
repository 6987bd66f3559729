"""`AttentionBackend`: cache write and attention kernels behind one contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.attention.batch import Batch
from kvcore.attention.query import AttentionQuery
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.layout import SizedLayout


@dataclass(frozen=True)
class AttentionLayer:
    """What is a layer's own, bound once after the weights are loaded.

    Attributes:
        cache_id: The cache the layer reads (and writes, unless `shared`).
        query: Its facts; mask, scale and soft-cap are read here, never off the KV group.
        alibi_slopes: float32 [H], or None.
        sinks: float32 [H] extra logits, or None.
        k_scale, v_scale: float32 scales, shape [] or [K], where the cache is quantized by tensor or head.
        shared: The layer reads another layer's cache and never writes.
    """

    cache_id: CacheId
    query: AttentionQuery
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    shared: bool = False


@dataclass(frozen=True)
class AttentionGroup:
    """The layers of one KV group that share backend and `AttentionQuery`.

    Attributes:
        kv_group: Index of the KV group, also into `Batch.groups`.
        query: The facts that all its layers share.
        layers: The layers, in model order.
        layout: How the fields of the KV group lie: which axis of a view is which.
    """

    kv_group: int
    query: AttentionQuery
    layers: tuple[AttentionLayer, ...]
    layout: SizedLayout


class AttentionBackend(ABC):
    """Made by `BackendSpec.create`, one for each backend and device; holds no request state.

    `cache` maps each field to the layer's view [N kernel blocks, *axes in the layout's memory order].
    """

    @abstractmethod
    def prepare(self, batch: Batch, group: AttentionGroup) -> Any:
        """Metadata for one step and one attention group, in the backend's own type.

        Called once a step for each group, before any of its layers; valid until the next `prepare`.
        """

    @abstractmethod
    def write(
        self,
        layer: AttentionLayer,
        tensors: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: Any,
    ) -> None:
        """Store the step's tokens into the slots of the group's slot mapping; -1 writes nothing.

        Args:
            layer: The layer.
            tensors: For KV heads ``k`` [T, K, D] and ``v`` [T, K, Dv]; quantized where the layout says so.
                For latents ``latent`` [T, rank + rope_dim].
            cache: The layer's field views.
            metadata: From `prepare`.
        """

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attention of the step's queries, written into `out`; prefill, decode and mixed batches alike.

        Args:
            layer: The layer.
            query: ``q`` [T, H, D]. Over latents it is absorbed: D is rank + rope_dim, the latent is the key
                of every head, and its first `rank` elements are the value (arXiv 2405.04434, appendix C).
            cache: The layer's field views; the step's tokens are already written.
            metadata: From `prepare`.
            out: [T, H, Dv]; a row that sees no key becomes 0.
            lse: float32 [T, H] natural log-sum-exp after scale and soft-cap, the sink included;
                -inf for a row that sees no key. None when it is not wanted.
        """
