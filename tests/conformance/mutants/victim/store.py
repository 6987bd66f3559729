"""From values to what the cache holds, and back; from slots to elements of a view."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.attention.backend import AttentionLayer
from kvcore.spec.layout import SizedLayout

INT8_TOP = 127


def in_token_order(name: str, view: torch.Tensor, layout: SizedLayout) -> torch.Tensor:
    """A field as [N, token, head, dim] (scales without dim), fp8 as bytes: torch indexes those."""
    field = next(f for f in layout.layout.fields if f.name == name)
    names = [axis.name for axis in field.axes]
    order = [1 + names.index(n) for n in ("token", "head", "dim") if n in names]
    if view.dtype == torch.float8_e4m3fn:
        view = view.view(torch.uint8)
    return view.permute(0, *order)


def put(view_NP: torch.Tensor, slots: torch.Tensor, size: int, values: torch.Tensor) -> None:
    """Store values [slots, ...]."""
    if values.dtype == torch.float8_e4m3fn:
        values = values.view(torch.uint8)
    block = slots // size
    offset = slots % size
    view_NP[block, offset] = values


def take(view_NP: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
    """Read [slots, ...]."""
    from_block = slots // size
    from_offset = slots % size
    return view_NP[from_block, from_offset]


def encode(layer: AttentionLayer, name: str, values: torch.Tensor, stored: torch.dtype) -> Mapping[str, torch.Tensor]:
    """The fields that stand for keys or values [T, K, D]."""
    if layer.query.quant is None:
        return {name: values.to(stored)}
    wide = values.float()
    if layer.query.quant == "token_head":
        scale = wide.abs().amax(-1) / INT8_TOP
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = (wide / divisor[..., None]).round()
        codes = codes.clamp(-INT8_TOP, INT8_TOP)
        return {name: codes.to(stored), f"{name}_scale": scale}
    scaled = wide / constant_scale(layer, name)
    top = torch.finfo(stored).max
    scaled = scaled.clamp(-top, top)
    return {name: scaled.to(stored)}


def decode(
    layer: AttentionLayer, name: str, codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers that codes [n, K, D] stand for."""
    if layer.query.cache_dtype == "fp8_e4m3":
        codes = codes.view(torch.float8_e4m3fn)
    numbers = codes.to(dtype)
    if scale is not None:
        numbers = numbers * scale[..., None]
    elif layer.query.quant is not None:
        numbers = numbers * constant_scale(layer, name)
    return numbers


def constant_scale(layer: AttentionLayer, name: str) -> torch.Tensor:
    """The scale of a whole tensor; 1 where there is none."""
    found = layer.k_scale if name == "k" else layer.v_scale
    return torch.ones(()) if found is None else found
