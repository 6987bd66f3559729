"""`ForwardPass`: one call of the model on its padded batch, as attention layers see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kvcore.backend import CacheId, IntegrityError, ModelError
from kvcore.cache import PagedCache, check_call
from kvcore_transformers.sequences import Part

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ForwardPass:
    """Takes the tokens that a step computes out of the padded batch, and puts their attention back.

    ::

        columns      .  .  a  b  c        padding, then tokens; the last of a row are those that the step computes
                     d  e  f  g  h
                     .  .  a  b  c        the same sequence again: computed once, given twice
        step         d e f g h a b c

    Args:
        paged: The cache; its step has begun.
        shape: (sequences, columns) of the padded batch.
        parts: The sequences of the step, in its order.
    """

    def __init__(self, paged: PagedCache, shape: tuple[int, int], parts: Sequence[Part]) -> None:
        self.paged, self.shape = paged, shape
        self.reached: Counter[CacheId] = Counter()
        size, width = shape
        self._all = len(parts) == size and all(p.count == width and p.lanes == [i] for i, p in enumerate(parts))
        if self._all:
            return
        taken: list[tuple[int, int]] = []  # of each token of the step its sequence and column
        given: list[tuple[int, int, int]] = []  # sequence, column, and the token of the step that it is
        for part in parts:
            columns, place = range(width - part.count, width), len(taken)
            taken += [(part.lanes[0], t) for t in columns]
            given += [(lane, t, place + i) for lane in part.lanes for i, t in enumerate(columns)]
        self._taken = torch.tensor(taken, device=paged.device).unbind(1)
        self._given = torch.tensor(given, device=paged.device).unbind(1)

    def attend(self, module: torch.nn.Module, tensors: Tensors, passed: dict[str, Any]) -> torch.Tensor:
        """Store keys and values of a layer and attend: [B, T, H, Dv], zeros where the step computes nothing.

        Args:
            module: The attention module.
            tensors: Queries [B, H, T, D], keys [B, K, T, D], values [B, K, T, Dv].
            passed: Keywords that the module passed to its attention.

        Raises:
            ModelError: The module asks for something else than its config declares, or for other tokens.
            IntegrityError: Gradients are wanted.
        """
        cache_id = CacheId(int(getattr(module, "layer_idx", -1)))
        if any((t.shape[0], t.shape[2]) != self.shape for t in tensors):
            raise ModelError(
                f"{type(module).__name__} attends to other tokens than those of the pass",
                field="shape",
                got=[list(t.shape) for t in tensors],
                allowed=f"{self.shape[0]} sequences of {self.shape[1]} columns",
            )
        if tensors[0].requires_grad:
            raise IntegrityError(
                "what lies in a paged cache has no gradients",
                field="requires_grad",
                got=True,
                allowed=False,
                remedy="call the model under torch.no_grad() or torch.inference_mode()",
            )
        query_THD, key_TKD, value_TKDv = map(self._flat, tensors)
        known = self.paged.facts.queries.get(cache_id)
        if known is None:
            raise ModelError(
                f"{type(module).__name__} has no cache",
                field="layer_idx",
                got=cache_id.layer,
                allowed="a layer's index",
            )
        check_call(cache_id, module, known, (query_THD, key_TKD, value_TKDv), passed, self.paged.facts.longest)
        self.reached[cache_id] += 1
        self.paged.write(cache_id, key_TKD, value_TKDv)
        return self._padded(self.paged.attend(cache_id, query_THD))

    def check_reached(self) -> None:
        """Raise `ModelError` unless the attention of every layer was called exactly once."""
        wrong = {str(c): self.reached[c] for c in self.paged.facts.queries if self.reached[c] != 1}
        if wrong:
            raise ModelError(
                "attention of this model does not go through the attention registry once a layer",
                field="model_type",
                got=f"calls by layer: {wrong}",
                allowed="1 for each layer",
                remedy="this architecture cannot run on a PagedCache with this version of transformers",
            )

    def _flat(self, tensor_BHTD: torch.Tensor) -> torch.Tensor:
        tensor_BTHD = tensor_BHTD.transpose(1, 2)
        return tensor_BTHD.flatten(0, 1) if self._all else tensor_BTHD[self._taken]

    def _padded(self, out_THD: torch.Tensor) -> torch.Tensor:
        if self._all:
            return out_THD.view(*self.shape, *out_THD.shape[1:])
        lanes, columns, places = self._given
        padded = out_THD.new_zeros(*self.shape, *out_THD.shape[1:])
        padded[lanes, columns] = out_THD[places]
        return padded
