"""`StepContext`: what an attention layer finds when the model calls it in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.attention.backend import AttentionBackend, AttentionLayer
from kvcore.attention.batch import Batch
from kvcore.errors import IntegrityError
from kvcore.models.forward_context import ForwardContext
from kvcore.spec.cache_spec import CacheId


@dataclass(frozen=True)
class BoundLayer:
    """A layer, its backend and its views, bound once before the first step.

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


class StepContext(ForwardContext):
    """Routes each attention call of a forward pass to its bound layer.

    Args:
        layers: Bound layers by cache.
    """

    def __init__(self, layers: Mapping[CacheId, BoundLayer]) -> None:
        self.layers = layers
        self._batch: Batch | None = None
        self._metadata: list[Any] = []
        self._watched: Mapping[int, slice] = {}
        self._found: dict[int, str] = {}

    @contextmanager
    def watch(self, spans: Mapping[int, slice]) -> Iterator[dict[int, str]]:
        """While it lasts, every layer looks at these rows' tokens; the dict fills with the first that is not finite.

        Args:
            spans: Tokens of the flat batch by row.
        """
        self._watched, self._found = spans, {}
        try:
            yield self._found
        finally:
            self._watched = {}

    def _look(self, cache_id: CacheId, tensors: Mapping[str, torch.Tensor]) -> None:
        for row, span in self._watched.items():
            for name, tensor_THD in tensors.items():
                if row in self._found:
                    break
                bad_H = ~torch.isfinite(tensor_THD[span]).all(dim=-1).all(dim=0)
                if bad_H.any():
                    head = int(bad_H.nonzero()[0])
                    self._found[row] = f"first in layer {cache_id.layer}, {name} of head {head}"

    def begin(self, batch: Batch, metadata: list[Any]) -> None:
        """Start a step: its batch, and the metadata of every attention group."""
        self._batch, self._metadata = batch, metadata

    def attend(
        self,
        cache_id: CacheId,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKDv: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend; see `ForwardContext`. Sinks were bound before."""
        bound = self.layers[cache_id]
        if self._batch is None:
            raise IntegrityError("attention was called outside a step", field="batch", got=None)
        metadata = self._metadata[bound.attention_group]
        if not bound.layer.shared:
            bound.backend.write(bound.layer, {"k": key_TKD, "v": value_TKDv}, bound.cache, metadata)
        heads, dim_v = query_THD.shape[1], bound.layer.query.head_dim_v
        out_THD = query_THD.new_empty(query_THD.shape[0], heads, dim_v)
        bound.backend.attend(bound.layer, {"q": query_THD}, bound.cache, metadata, out_THD)
        if self._watched:
            given = {"queries": query_THD, "keys": key_TKD, "values": value_TKDv}
            self._look(cache_id, {**given, "attention output": out_THD})
        return out_THD
