"""`ForwardContext`: what a model's attention layers call during one forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvcore.spec.cache_spec import CacheId


class ForwardContext(ABC):
    """One step as the model sees it; the worker makes it, the bridge hands it to every layer.

    It travels with the keyword arguments of the forward pass: there is no global state.
    """

    @abstractmethod
    def attend(
        self,
        cache_id: CacheId,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKDv: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, and attend to all that the layer may see.

        Args:
            cache_id: The layer's cache.
            query_THD: [T, H, D] queries after rotary embedding; strides are arbitrary.
            key_TKD: [T, K, D] keys of the same tokens.
            value_TKDv: [T, K, Dv] values of the same tokens.
            sinks: [H] extra logits, or None. The same parameter that `attention_tensors` names.

        Returns:
            [T, H, Dv] in the dtype of the queries.
        """


class ZeroContext(ForwardContext):
    """Stores nothing and answers zeros: for proofs of reach, and to measure memory before a cache."""

    def attend(
        self,
        cache_id: CacheId,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKDv: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Zeros [T, H, Dv]."""
        return query_THD.new_zeros(*query_THD.shape[:2], value_TKDv.shape[-1])
