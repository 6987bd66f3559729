"""The arguments of the kernels, from layers, views and the step."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

import torch

from kvcore.backend import AttentionLayer, LayoutError
from kvcore.backend import dtype as dtype_of
from kvcore_triton.targets import Fp8, Target, power_of_2

Cache = Mapping[str, torch.Tensor]
SCALES = {None: 0, "tensor": 1, "head": 1, "token_head": 2}
# Most elements, and heads, of a head tile of one token in the write kernel.
WRITE_ELEMENTS, WRITE_HEADS = 2048, 8
# Widest load or store of a thread; the layouts align every page and field to as much.
VECTOR_BYTES = 16


class Strides(NamedTuple):
    """Elements from one block, token, head to the next."""

    block: int
    token: int
    head: int


def strides(field: torch.Tensor, heads_first: bool) -> Strides:
    """Strides of a field view [N, token, head, ...] or [N, head, token, ...]."""
    block, a, b = field.stride()[:3]
    return Strides(block, b, a) if heads_first else Strides(block, a, b)


class Constants:
    """Small tensors that stand for what a layer does not have; made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[str, int], torch.Tensor] = {}

    def get(self, value: float, size: int) -> torch.Tensor:
        """float32 [size] of one value."""
        key = (str(value), size)
        if key not in self._made:
            self._made[key] = torch.full((size,), value, dtype=torch.float32, device=self._device)
        return self._made[key]


def scale_arguments(layer: AttentionLayer, cache: Cache, heads_first: bool, constants: Constants) -> dict[str, Any]:
    """Pointers and strides of the scales of keys and values."""
    found: dict[str, Any] = {}
    for name in ("k", "v"):
        held = cache.get(f"{name}_scale")
        if held is not None:
            at = strides(held, heads_first)
        else:
            own = layer.k_scale if name == "k" else layer.v_scale
            held = constants.get(1.0, 1) if own is None else own
            at = Strides(0, 0, held.stride(0) if held.dim() and held.numel() > 1 else 0)
        found |= {
            f"{name}_scale_ptr": held,
            f"{name}_scale_block": at.block,
            f"{name}_scale_token": at.token,
            f"{name}_scale_head": at.head,
        }
    return found


def unit_of(dtype: str, *dims: int) -> int:
    """Elements that every row of these dims starts at a multiple of, as far as a vector is wide."""
    return gcd(8 * VECTOR_BYTES // dtype_of(dtype).bits, *dims)


def aligned(tensor: torch.Tensor, unit: int) -> bool:
    """Whether the last axis is contiguous, and every row starts at a multiple of `unit` elements."""
    rows = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % VECTOR_BYTES == 0
        and not any(n > 1 and s % unit for n, s in rows)
    )


def in_units(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """`tensor` where its rows start at multiples of `unit`, as a projection leaves them; else a copy."""
    return tensor if aligned(tensor, unit) else tensor.clone(memory_format=torch.contiguous_format)


def field_arguments(cache: Cache, heads_first: bool, unit: int) -> dict[str, int]:
    """Strides of keys and values in the cache, in units.

    Raises:
        LayoutError: A row is not where the layout's alignment puts it.
    """
    found: dict[str, int] = {}
    for name in ("k", "v"):
        if not aligned(cache[name], unit):
            raise LayoutError(
                f"rows of {name} do not start at multiples of {unit} elements, the last axis contiguous",
                field=name,
                got=cache[name].stride(),
                allowed=f"strides that are multiples of {unit}, an address that is one of {VECTOR_BYTES}",
                remedy="make the views of a layout of this backend",
            )
        at = strides(cache[name], heads_first)
        found |= {f"{name}_{axis}": n // unit for axis, n in at._asdict().items()}
    return found


def fp8_of(layer: AttentionLayer, target: Target) -> Fp8 | None:
    """How the target stores the layer's cache, None where that is no fp8."""
    return target.fp8.get(layer.query.cache_dtype)


def readable(field: torch.Tensor, fp8: Fp8 | None) -> torch.Tensor:
    """The field in the type that the target loads."""
    if fp8 is None:
        return field
    return field.view(torch.uint8 if fp8.half_bytes else getattr(torch, fp8.torch_name))


def dims(layer: AttentionLayer) -> dict[str, int]:
    """Dimensions and the powers of 2 above them."""
    query = layer.query
    return {
        "D": query.head_dim,
        "DV": query.head_dim_v,
        "DP": power_of_2(query.head_dim),
        "DVP": power_of_2(query.head_dim_v),
    }


def units(layer: AttentionLayer) -> tuple[int, int]:
    """Elements that rows of queries, values and outputs, and those of the cache, start at multiples of."""
    query = layer.query
    both = query.head_dim, query.head_dim_v
    return unit_of(query.dtype, *both), unit_of(query.cache_dtype, *both)


def most_write_heads(width: int) -> int:
    """Most heads of a program of the write kernel, for rows of `width`."""
    return min(WRITE_HEADS, max(1, WRITE_ELEMENTS // width))


def write_constants(layer: AttentionLayer, target: Target) -> dict[str, Any]:
    """Compile-time constants of the write kernel."""
    found: dict[str, Any] = dims(layer)
    fp8 = fp8_of(layer, target)
    most = most_write_heads(max(found["DP"], found["DVP"]))
    found["HEADS"] = min(1 << (layer.query.num_kv_heads - 1).bit_length(), most)
    found["UNIT"], found["FIELD_UNIT"] = units(layer)
    found["SCALES"] = SCALES[layer.query.quant]
    found["FORMAT"] = 0 if layer.query.quant is None else (1 if fp8 is None else 2)
    kind = fp8 or Fp8("", "", dtype_of("int8").largest, 3, 7)
    return found | {"TOP": kind.top, "MANTISSA": kind.mantissa, "BIAS": kind.bias, "SIGNED_ZERO": kind.signed_zero}
