"""The cache write: keys and values of the step into their slots, quantized on the way.

fp8 codes are made by integer arithmetic and stored as bytes: the same bits on every target, interpreted or
compiled, whether or not the target has the type. Integers are not specialised; strides are counted in UNITs
(values) and FIELD_UNITs (fields), as in `attend_tiles`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2^23: added to a float32 below 2^22 it leaves the number, rounded half to even, in the low bits.
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)

# Arguments of which nothing is assumed, as in `kernels.attention`.
LOOSE = [
    "k_scale_ptr",
    "v_scale_ptr",
    "slots_ptr",
    "k_value_token",
    "k_value_head",
    "v_value_token",
    "v_value_head",
    "k_block",
    "k_token",
    "k_head",
    "v_block",
    "v_token",
    "v_head",
    "k_scale_block",
    "k_scale_token",
    "k_scale_head",
    "v_scale_block",
    "v_scale_token",
    "v_scale_head",
    "block_size",
    "num_heads",
]


@triton.jit
def to_fp8(value, TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGNED_ZERO: tl.constexpr):
    """fp8 codes of float32 values: nearest, ties to the even code, clamped to +-TOP; NaN stays NaN."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    a = tl.minimum(tl.abs(value), TOP)
    bits = a.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # Below the least normal number codes are even steps.
    step = a * (2.0 ** (BIAS - 1 + MANTISSA)) + ROUNDER
    code = tl.where(a < 2.0 ** (1 - BIAS), step.to(tl.int32, bitcast=True) - ROUNDER_BITS, normal)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    if SIGNED_ZERO:
        code = tl.where(value == value, code | sign, 0x7F)
    else:
        code = tl.where(value == value, tl.where(code == 0, 0, code | sign), 0x80)
    return code.to(tl.uint8)


@triton.jit
def to_int8(value):
    """int8 codes of float32 values: half to even, -127 .. 127."""
    near = tl.minimum(tl.maximum(value, -127.0), 127.0) + ROUNDER
    return (near.to(tl.int32, bitcast=True) - ROUNDER_BITS).to(tl.int8)


@triton.jit
def write_one(
    values_ptr,
    field_ptr,
    scale_ptr,
    token,
    block,
    offset,
    h,
    head_ok,
    value_token,
    value_head,
    field_block,
    field_token,
    field_head,
    scale_block,
    scale_token,
    scale_head,
    D: tl.constexpr,
    DP: tl.constexpr,
    UNIT: tl.constexpr,
    FIELD_UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):
    """Keys or values of some heads of one token."""
    d = tl.arange(0, DP)
    ok = head_ok[:, None] & (d < D)[None, :]
    value_row = (token * value_token + h * value_head) * UNIT
    value = tl.load(values_ptr + value_row[:, None] + d[None, :], mask=ok, other=0.0)
    if FORMAT > 0:
        value = value.to(tl.float32)
        if SCALES == 2:
            scale = tl.div_rn(tl.max(tl.abs(value), 1), tl.full([1], TOP, tl.float32))
            scale_at = scale_ptr + block * scale_block + offset * scale_token + h * scale_head
            tl.store(scale_at, scale, mask=head_ok)
            scale = tl.where(scale == 0.0, 1.0, scale)
        else:
            scale = tl.load(scale_ptr + h * scale_head, mask=head_ok, other=1.0)
        value = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    if FORMAT == 1:
        value = to_int8(value)
    if FORMAT == 2:
        value = to_fp8(value, TOP, MANTISSA, BIAS, SIGNED_ZERO)
    field_row = (block * field_block + offset * field_token + h * field_head) * FIELD_UNIT
    tl.store(field_ptr + field_row[:, None] + d[None, :], value, mask=ok)


@triton.jit(do_not_specialize=LOOSE)
def write_step(
    k_ptr,
    v_ptr,
    k_field_ptr,
    v_field_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    k_value_token,
    k_value_head,
    v_value_token,
    v_value_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    k_scale_block,
    k_scale_token,
    k_scale_head,
    v_scale_block,
    v_scale_token,
    v_scale_head,
    block_size,
    num_heads,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    FIELD_UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):
    """One program: HEADS heads of a token. FORMAT: 0 as it is, 1 int8, 2 fp8; SCALES as in `attend_tiles`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        head_ok = h < num_heads
        write_one(
            k_ptr,
            k_field_ptr,
            k_scale_ptr,
            token,
            block,
            offset,
            h,
            head_ok,
            k_value_token,
            k_value_head,
            k_block,
            k_token,
            k_head,
            k_scale_block,
            k_scale_token,
            k_scale_head,
            D,
            DP,
            UNIT,
            FIELD_UNIT,
            SCALES,
            FORMAT,
            TOP,
            MANTISSA,
            BIAS,
            SIGNED_ZERO,
        )
        write_one(
            v_ptr,
            v_field_ptr,
            v_scale_ptr,
            token,
            block,
            offset,
            h,
            head_ok,
            v_value_token,
            v_value_head,
            v_block,
            v_token,
            v_head,
            v_scale_block,
            v_scale_token,
            v_scale_head,
            DV,
            DVP,
            UNIT,
            FIELD_UNIT,
            SCALES,
            FORMAT,
            TOP,
            MANTISSA,
            BIAS,
            SIGNED_ZERO,
        )
