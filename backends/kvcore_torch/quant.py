"""Quantized caches: int8 and fp8 codes, with a scale for the tensor, each head, or each token and head.

    scale    tensor, head    a constant of the layer
             token_head      amax / top over one token and head, float32, a field of the page
    code     value / scale, rounded half to even, clamped to -top .. top
    top      int8 127, fp8 e4m3 448, fp8 e5m2 57344

A token of zeros has scale 0 and codes 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.backend import AttentionLayer, dtype


def encode(layer: AttentionLayer, name: str, values_TKD: torch.Tensor, stored: torch.dtype) -> dict[str, torch.Tensor]:
    """The fields that stand for keys or values, in the cache's dtypes.

    Args:
        layer: Granularity, and the constant scale where there is one.
        name: ``k`` or ``v``.
        values_TKD: [T, K, D] in the model's dtype.
        stored: dtype of the field.

    Returns:
        The field [T, K, D], and for token-and-head scales ``<name>_scale`` float32 [T, K].
    """
    wide = values_TKD.float()
    top = dtype(layer.query.cache_dtype).largest
    if layer.query.quant == "token_head":
        scale_TK = wide.abs().amax(-1) / top
        divisor = scale_TK.masked_fill(scale_TK == 0, 1)[..., None]
        return {name: _codes(wide / divisor, top, stored), f"{name}_scale": scale_TK}
    return {name: _codes(wide / constant_scale(layer, name), top, stored)}


def decode(layer: AttentionLayer, name: str, values_KnD: torch.Tensor, scales_Kn: torch.Tensor | None) -> torch.Tensor:
    """The values that gathered codes [K, n, D] stand for; `scales_Kn` where the page holds scales."""
    if layer.query.quant is None:
        return values_KnD
    if scales_Kn is not None:
        return values_KnD * scales_Kn[..., None].to(values_KnD.dtype)
    scale = constant_scale(layer, name).to(values_KnD.dtype)
    return values_KnD * (scale[..., None] if scale.dim() else scale)


def constant_scale(layer: AttentionLayer, name: str) -> torch.Tensor:
    """The layer's float32 scale, [] or [K, 1]."""
    found: torch.Tensor = getattr(layer, f"{name}_scale")
    return found[:, None] if found.dim() else found


def as_bytes(field: torch.Tensor) -> torch.Tensor:
    """An fp8 field as bytes: torch indexes those and not fp8. Other fields as they are."""
    return field.view(torch.uint8) if field.is_floating_point() and field.itemsize == 1 else field


def scale_field(cache: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """The view of ``<name>_scale``, or None where the page holds none."""
    return cache.get(f"{name}_scale")


def _codes(wide: torch.Tensor, top: float, stored: torch.dtype) -> torch.Tensor:
    rounded = wide if stored.is_floating_point else wide.round()
    return rounded.clamp(-top, top).to(stored)
