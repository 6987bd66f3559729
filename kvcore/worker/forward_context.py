"""`StepContext`: what an attention layer finds when the model calls it in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from kvcore.models.forward_context import ForwardContext
from kvcore.spec.cache_spec import CacheId
from kvcore.worker.bound_attention import BoundAttention


class StepContext(ForwardContext):
    """Routes each attention call of a forward pass to its bound layer.

    Args:
        attention: The bound layers.
    """

    def __init__(self, attention: BoundAttention) -> None:
        self.attention = attention
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
        self.attention.write(cache_id, key_TKD, value_TKDv)
        out_THD = self.attention.attend(cache_id, query_THD)
        if self._watched:
            given = {"queries": query_THD, "keys": key_TKD, "values": value_TKDv}
            self._look(cache_id, {**given, "attention output": out_THD})
        return out_THD
