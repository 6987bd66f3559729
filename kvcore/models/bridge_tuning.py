"""Query scaling that a module derives from the whole batch, done per token instead.

Llama-4 scales the queries of its layers without rope by a function of the position
(arXiv 2501.19399). The module counts positions from the start of the batch and the length of its cache;
in a flat batch of several sequences both are wrong. The bridge switches the module's own scaling off
and applies the same formula to each token's own position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore.spec.cache_spec import CacheId


@dataclass(frozen=True)
class PositionTuning:
    """``1 + strength * log1p(floor((position + 1) / floor_scale))``, times the query."""

    floor_scale: float
    strength: float

    def scale(self, query_THD: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        """The scaled queries, in their own dtype."""
        steps = torch.floor((position_ids_T.float() + 1.0) / self.floor_scale)
        factor_T = torch.log1p(steps) * self.strength + 1.0
        return (query_THD * factor_T[:, None, None]).to(query_THD.dtype)


def take_over_tuning(model: torch.nn.Module) -> dict[CacheId, PositionTuning]:
    """Switch off the tuning of every module that has it; by cache, what the bridge has to do instead."""
    tuning: dict[CacheId, PositionTuning] = {}
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            layer, floor, strength = module.layer_idx, module.floor_scale, module.attn_scale
            tuning[CacheId(int(layer))] = PositionTuning(float(floor), float(strength))  # type: ignore[arg-type]
            module.attn_temperature_tuning = False  # type: ignore[assignment]
    return tuning
