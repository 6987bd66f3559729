"""Quantized caches: int8 with a float32 scale for each token and head, fp8 e4m3 with one scale a tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.attention.backend import AttentionLayer

INT8_TOP = 127.0


def encode(
    layer: AttentionLayer, name: str, values_TKD: torch.Tensor, stored: torch.dtype
) -> dict[str, torch.Tensor]:
    """The fields that stand for keys or values, in the cache's dtypes.

    Args:
        layer: Granularity, and the constant scale where there is one.
        name: ``k`` or ``v``.
        values_TKD: [T, K, D] in the model's dtype.
        stored: dtype of the field.

    Returns:
        The field [T, K, D], and for token-and-head scales ``<name>_scale`` float32 [T, K]. A token of zeros
        has scale 0 and reads back as zeros.
    """
    wide = values_TKD.float()
    if layer.query.quant == "token_head":
        scale_TK = wide.abs().amax(-1) / INT8_TOP
        divisor = scale_TK.masked_fill(scale_TK == 0, 1)
        codes = (wide / divisor[..., None]).round_().clamp_(-INT8_TOP, INT8_TOP)
        return {name: codes.to(stored), f"{name}_scale": scale_TK}
    top = torch.finfo(stored).max
    return {name: (wide / constant_scale(layer, name)).clamp_(-top, top).to(stored)}


def decode(
    layer: AttentionLayer, name: str, values_KnD: torch.Tensor, scales_Kn: torch.Tensor | None
) -> torch.Tensor:
    """The values that gathered codes [K, n, D] stand for; `scales_Kn` where the page holds scales."""
    if scales_Kn is not None:
        return values_KnD * scales_Kn[..., None].to(values_KnD.dtype)
    if layer.query.quant is None:
        return values_KnD
    return values_KnD * constant_scale(layer, name).to(values_KnD.dtype)


def constant_scale(layer: AttentionLayer, name: str) -> torch.Tensor:
    """The layer's float32 scale of a tensor; 1 where the checkpoint brings none."""
    found = layer.k_scale if name == "k" else layer.v_scale
    return torch.ones(()) if found is None else found


def as_bytes(field: torch.Tensor) -> torch.Tensor:
    """An fp8 field as bytes: torch indexes those and not fp8. Other fields as they are."""
    return field.view(torch.uint8) if field.dtype == torch.float8_e4m3fn else field


def scale_field(cache: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """The view of ``<name>_scale``, or None where the page holds none."""
    return cache.get(f"{name}_scale")
