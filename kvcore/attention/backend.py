"""`AttentionBackend`: cache write and attention kernels behind one contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.attention.batch import Batch
from kvcore.attention.query import AttentionQuery
from kvcore.errors import SpecError
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.layout import SizedLayout


@dataclass(frozen=True)
class AttentionLayer:
    """What is a layer's own, bound once after the weights are loaded.

    Attributes:
        cache_id: The cache the layer reads (and writes, unless `shared`).
        query: Its facts; mask, scale and soft-cap are read here, never off the KV group.
        alibi_slopes: float32 [H] exactly where the query says `alibi`.
        sinks: float32 [H] extra logits exactly where the query says `sinks`.
        k_scale, v_scale: float32, [] where the cache is quantized by tensor and [K] by head, else None.
            A code times its scale is the value.
        shared: The layer reads another layer's cache and never writes.

    Raises:
        SpecError: A tensor that the facts ask for is missing or misshapen, or one is given that they do not name.
    """

    cache_id: CacheId
    query: AttentionQuery
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        query = self.query
        scale = {"tensor": (), "head": (query.num_kv_heads,)}.get(query.quant or "")
        self._check("alibi_slopes", (query.num_heads,) if query.alibi else None)
        self._check("sinks", (query.num_heads,) if query.sinks else None)
        self._check("k_scale", scale)
        self._check("v_scale", scale)

    def _check(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Fails closed: a fact without its tensor would be ignored by one backend and crash in another."""
        found: torch.Tensor | None = getattr(self, name)
        got = None if found is None else tuple(found.shape)
        if got == shape and (found is None or found.dtype == torch.float32):
            return
        raise SpecError(
            f"layer {self.cache_id} and its facts disagree about {name}",
            field=name,
            got="none" if found is None else f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}",
            allowed="none: the query does not name it" if shape is None else f"float32 {list(shape)}",
        )


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

        Called once a step for each layer that owns its cache, before its `attend`. The backend quantizes: it
        *divides* by the scale (`attend` multiplies), rounds to the nearest code, ties to the even one, and
        saturates at the largest finite value (int8 at -127 and 127). Scales of tensor and head are the layer's;
        those of token and head are the largest magnitude over the largest code, float32, written beside the codes.

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
                -inf for a row that sees no key, where there is a sink as well. None when it is not wanted.
        """
