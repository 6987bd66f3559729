"""fp8 caches with one scale a tensor: codes are ``value / scale``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.backend import AttentionLayer, CacheId, dtype

Kept = tuple[torch.Tensor | None, torch.Tensor | None, float, float]


def encode(
    layer: AttentionLayer, tensors: Mapping[str, torch.Tensor], cache: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The codes of keys and values [T, K, D], beyond the format's range its largest finite one."""
    codes, top = {}, dtype(layer.query.cache_dtype).largest
    for name in ("k", "v"):
        scale: torch.Tensor = getattr(layer, f"{name}_scale")
        stored, values = cache[name].dtype, tensors[name].float()
        codes[name] = (values / scale).clamp_(-top, top).to(stored)
    return codes


class Scales:
    """The layers' scales as numbers: the library multiplies its softmax scale by one of them.

    They never change after start, so that the device is asked once a layer.
    """

    def __init__(self) -> None:
        self._kept: dict[CacheId, Kept] = {}

    def of(self, layer: AttentionLayer) -> tuple[float, float]:
        """Scale of keys and of values; 1 where the layer has none."""
        kept = self._kept.get(layer.cache_id)
        if kept is None or kept[0] is not layer.k_scale or kept[1] is not layer.v_scale:
            k, v = (1.0 if s is None else float(s) for s in (layer.k_scale, layer.v_scale))
            kept = self._kept[layer.cache_id] = (layer.k_scale, layer.v_scale, k, v)
        return kept[2], kept[3]
