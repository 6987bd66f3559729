"""Reference encode and decode of cached values: plain dtypes, int8 and fp8, independent of any backend.

token_head     scale = amax / top over one token and head, float32, a field of the page; a token of zeros
               has scale 0 and codes 0
tensor, head   the scale is the layer's constant
int8           code = value / scale, half to even, -127 .. 127; top is 127
fp8            code = the nearest fp8 value of value / scale, ties to the even code, clamped to the largest
               finite value, which is top: 448 (e4m3), 57344 (e5m2)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from kvcore.memory.dtypes import torch_dtype
from kvcore.spec.content import KVHeads, Latent
from kvcore.testing.oracle.attention import Array

Fields = dict[str, torch.Tensor]
# (exponent bits, mantissa bits, exponent bias) and whether the top exponent holds numbers (e4m3fn does).
_FP8 = {"fp8_e4m3": (4, 3, 7, True), "fp8_e5m2": (5, 2, 15, False)}


@cache
def fp8_values(name: str) -> Array:
    """The value of each of the 256 codes, built from sign, exponent and mantissa."""
    bits, mantissa_bits, bias, finite_top = _FP8[name]
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = (code >> mantissa_bits) & (2**bits - 1), code & (2**mantissa_bits - 1)
        share = mantissa / 2**mantissa_bits
        value = share * 2.0 ** (1 - bias) if exponent == 0 else (1 + share) * 2.0 ** (exponent - bias)
        if exponent == 2**bits - 1:
            if finite_top:
                value = np.nan if mantissa == 2**mantissa_bits - 1 else value
            else:
                value = np.inf if mantissa == 0 else np.nan
        values[code] = -value if code >= 128 else value
    return values


def encode(content: KVHeads | Latent, name: str, values_nKD: Array, scale: Array | None) -> Fields:
    """What the cache must hold for field `name` ("k", "v" or "latent"), in storage dtypes.

    Args:
        content: dtype and granularity.
        name: Field.
        values_nKD: Values [n, K, D]; a latent is one head.
        scale: The layer's constant scale, [] or [K], for tensor and head granularity.

    Returns:
        The field, and its scale field where the page has one.
    """
    if isinstance(content, Latent):
        return {name: torch.from_numpy(values_nKD[:, 0]).to(torch_dtype(content.dtype))}
    if content.quant is None:
        return {name: torch.from_numpy(values_nKD).to(torch_dtype(content.dtype))}
    if content.quant.granularity == "token_head":
        scale_nK = (np.abs(values_nKD).max(axis=2) / top(content.dtype)).astype(np.float32)
        divisor = np.where(scale_nK == 0, 1, scale_nK).astype(np.float64)
        codes = _codes(content.dtype, values_nKD / divisor[..., None])
        return {name: codes, f"{name}_scale": torch.from_numpy(scale_nK)}
    return {name: _codes(content.dtype, values_nKD / _constant(scale))}


def top(name: str) -> float:
    """The largest number that a quantized dtype holds."""
    if name == "int8":
        return 127.0
    values = fp8_values(name)
    return float(values[np.isfinite(values)].max())


def decode(content: KVHeads | Latent, name: str, fields: Mapping[str, torch.Tensor], scale: Array | None) -> Array:
    """The float64 values [n, K, D] that stored fields stand for."""
    stored = fields[name]
    if isinstance(content, Latent):
        return np.asarray(stored.double().numpy()[:, None])
    if content.quant is None:
        return np.asarray(stored.double().numpy())
    if content.dtype in _FP8:
        plain = fp8_values(content.dtype)[stored.contiguous().view(torch.uint8).numpy()]
    else:
        plain = stored.double().numpy()
    if content.quant.granularity == "token_head":
        return np.asarray(plain * fields[f"{name}_scale"].double().numpy()[..., None])
    return np.asarray(plain * _constant(scale))


def write_problem(
    content: KVHeads | Latent, name: str, values_nKD: Array, fields: Mapping[str, torch.Tensor], scale: Array | None
) -> str | None:
    """Why what a backend stored for `values_nKD` is not right, or None.

    Plain dtypes must agree bit for bit. Quantized ones must be as near as the format allows: a code may
    differ from the reference only where both are equally near, because dividing by a scale and
    multiplying by its inverse round differently.
    """
    want = encode(content, name, values_nKD, scale)
    if isinstance(content, Latent) or content.quant is None:
        return None if _same_bits(want[name], fields[name]) else f"field {name} is not what was written"
    step: Array
    if content.quant.granularity == "token_head":
        got_scale, want_scale = (f[f"{name}_scale"].double().numpy() for f in (fields, want))
        if not np.allclose(got_scale, want_scale, rtol=2.0**-21, atol=0, equal_nan=False):
            return f"field {name}_scale is not amax / {top(content.dtype):g} of its token and head"
        step = want_scale[..., None]
    else:
        step = _constant(scale)
    got, best = (decode(content, name, f, scale) for f in (fields, want))
    # Relative to the value: the scale itself may be one rounding off.
    slack = 1e-5 * step + 2.0**-20 * np.abs(values_nKD)
    bad = ~(np.abs(got - values_nKD) <= np.abs(best - values_nKD) + slack)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        return (
            f"field {name} at [token, head, dim] {where} stands for {got[where]:.6g}, "
            f"nearest to {values_nKD[where]:.6g} is {best[where]:.6g}"
        )
    return None


def _codes(name: str, wide: Array) -> torch.Tensor:
    if name == "int8":
        return torch.from_numpy(np.clip(np.rint(wide), -127, 127).astype(np.int8))
    return torch.from_numpy(_nearest_fp8(name, wide)).view(torch_dtype(name))


def _constant(scale: Array | None) -> Array:
    value = np.asarray(1.0 if scale is None else scale, dtype=np.float64)
    return value.reshape(-1, 1) if value.ndim else value


def _nearest_fp8(name: str, wide: Array) -> np.typing.NDArray[np.uint8]:
    table = fp8_values(name)[:128]
    table = table[np.isfinite(table)]  # rises with the code
    size = np.minimum(np.abs(wide), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    pick = np.where((low < high) | ((low == high) & ((above - 1) % 2 == 0)), above - 1, above)
    return np.asarray(pick + 128 * np.signbit(wide), dtype=np.uint8)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
