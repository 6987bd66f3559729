"""Attention over a paged cache: one kernel for prefill, chunked, mixed and decode, and a merge.

A program takes one *tile*: some queries of one sequence times the query heads of one KV head, as the rows of
one matrix (row r is query ``r // heads`` and head ``r % heads``), and walks an interval of keys. Every mask
of the contract is an interval of keys a query, so a mask costs two integers a row, and blocks outside the
tile's interval are never touched. Where the keys of a tile are split over several programs, each leaves its
partial result in a workspace and `merge_splits` joins them.

Soft-max runs in base 2. Offsets are 64 bits wide from the block id, the token and the head on (heads
widen where they are used: held through the loop, wide ones cost registers that some tiles lack).

No integer is specialised: values make no variant. What loads and stores must know of strides is a constant:
those of queries and outputs are counted in UNITs, those of keys and values in CACHE_UNITs, elements that
every row starts at a multiple of.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a work item; `kvcore_triton.tile_schedule` fills them.
SEQ = tl.constexpr(0)  # row of the block table
ROW = tl.constexpr(1)  # first query in the flat batch
COUNT = tl.constexpr(2)  # queries
POSITION = tl.constexpr(3)  # position of the first query
BEGIN = tl.constexpr(4)  # first key of this program
END = tl.constexpr(5)  # one after its last
START = tl.constexpr(6)  # position of the table's first slot
KEYS_END = tl.constexpr(7)  # one after the sequence's last key
PARTIAL = tl.constexpr(8)  # place in the workspace, -1 for none: the tile is not split
COLUMNS = tl.constexpr(9)

# Arguments of which nothing is assumed: all numbers, and tensors from outside that are read one by one.
LOOSE = [
    "k_scale_ptr",
    "v_scale_ptr",
    "slopes_ptr",
    "sinks_ptr",
    "table_ptr",
    "lse_ptr",
    "scale",
    "softcap",
    "window",
    "right",
    "chunk",
    "want_lse",
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    "lse_token",
    "table_row",
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
    "group",
    "heads",
    "tiles_per_head",
]
LOOSE_IN_MERGE = [
    "sinks_ptr",
    "lse_ptr",
    "want_lse",
    "out_token",
    "out_head",
    "lse_token",
    "group",
    "heads",
    "tiles_per_head",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def capped(score, cap):
    """``cap * tanh(score / cap)``, with a series where the quotient of exponentials would cancel."""
    x = score / cap
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    x2 = x * x
    series = a * (1.0 - x2 * (0.3333333333333333 - x2 * (0.13333333333333333 - x2 * 0.05396825396825397)))
    t = tl.where(a < 0.125, series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -t, t) * cap


@triton.jit
def number(value, HALF_BYTES: tl.constexpr):
    """A cached value as a number; e5m2 comes as bytes that are the upper halves of float16."""
    if HALF_BYTES:
        value = (value.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return value


@triton.jit
def stored(value, like, UPCAST: tl.constexpr):
    """`value` in the output's type. The interpreter cuts bfloat16 off: there it is rounded by hand."""
    if UPCAST and like == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(like)


@triton.jit
def with_sink(peak, total, sink):
    """Peak and sum with one more logit; rows that see no key (sum 0) stay empty."""
    top = tl.where(total > 0, tl.maximum(peak, sink), peak)
    safe = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(peak - safe)
    total = tl.where(total > 0, total * shrink + tl.exp2(sink - safe), total)
    return top, total, shrink


@triton.jit(do_not_specialize=LOOSE)
def attend_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    table_ptr,
    work_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale,
    softcap,
    window,
    right,
    chunk,
    want_lse,
    q_token,
    q_head,
    out_token,
    out_head,
    lse_token,
    table_row,
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
    group,
    heads,
    tiles_per_head,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    CACHE_UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    GENERAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile, or one split of it.

    SCALES: 0 none, 1 a constant (for the tensor or each head), 2 a field (for each token and head).
    HALF_BYTES: the cache is e5m2, loaded as bytes.
    GENERAL: soft-cap and ALiBi are looked at. D, DV are the dimensions, DP, DVP the powers of 2 above.
    """
    item, y = tl.program_id(0), tl.program_id(1)
    work = work_ptr + item * COLUMNS
    seq, row0 = tl.load(work + SEQ).to(tl.int64), tl.load(work + ROW).to(tl.int64)
    count, position0 = tl.load(work + COUNT), tl.load(work + POSITION)
    begin, end = tl.load(work + BEGIN), tl.load(work + END)
    start, keys_end = tl.load(work + START), tl.load(work + KEYS_END)
    partial = tl.load(work + PARTIAL).to(tl.int64)

    r, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    kv_head = y // tiles_per_head
    in_group = (y % tiles_per_head) * heads + r % heads
    token, head = r // heads, kv_head * group + in_group
    row_ok = (token < count) & (in_group < group)

    # The interval of keys that each row sees.
    position = position0 + token
    chunk_start = position // chunk * chunk
    first = tl.maximum(tl.maximum(position - window + 1, chunk_start), start)
    last = tl.minimum(tl.minimum(position + right, chunk_start + chunk), keys_end)

    q_row = ((row0 + token) * q_token + head.to(tl.int64) * q_head) * UNIT
    q = tl.load(q_ptr + q_row[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    factor, v_factor = scale, 1.0
    if SCALES == 1:
        factor = scale * tl.load(k_scale_ptr + kv_head * k_scale_head)
        v_factor = tl.load(v_scale_ptr + kv_head * v_scale_head)
    if GENERAL:
        slope = tl.load(slopes_ptr + head, mask=row_ok, other=0.0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, DVP], 0.0, tl.float32)
    for at in range(begin, end, BLOCK_N):
        key = at + n
        key_ok = key < end
        local = key - start
        block = tl.load(table_ptr + seq * table_row + local // block_size, mask=key_ok, other=0).to(tl.int64)
        offset = local % block_size
        k_row = (block * k_block + offset * k_token + kv_head * k_head) * CACHE_UNIT
        k_at = k_ptr + k_row[None, :] + d[:, None]
        k = number(tl.load(k_at, mask=key_ok[None, :] & (d < D)[:, None], other=0.0), HALF_BYTES)
        score = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factor
        if SCALES == 2:
            k_scale_at = block * k_scale_block + offset * k_scale_token + kv_head * k_scale_head
            score *= tl.load(k_scale_ptr + k_scale_at, mask=key_ok, other=0.0)[None, :]
        if GENERAL:
            if softcap > 0.0:
                score = capped(score, softcap)
            distance = tl.abs(position[:, None] - key[None, :]).to(tl.float32)
            score -= slope[:, None] * distance
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None]) & key_ok[None, :]
        score = tl.where(seen, score * LOG2E, float("-inf"))

        top = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        # Values that no row of the tile may see are not loaded, so that 0 never meets a NaN.
        v_row = (block * v_block + offset * v_token + kv_head * v_head) * CACHE_UNIT
        v_at = v_ptr + v_row[:, None] + dv[None, :]
        v = number(tl.load(v_at, mask=key_ok[:, None] & (dv < DV)[None, :], other=0.0), HALF_BYTES)
        if SCALES == 2:
            v_scale_at = block * v_scale_block + offset * v_scale_token + kv_head * v_scale_head
            v_scale = tl.load(v_scale_ptr + v_scale_at, mask=key_ok, other=0.0)
            v = (v.to(tl.float32) * v_scale[:, None]).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        peak = top

    if partial < 0:
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")) * LOG2E
        peak, total, shrink = with_sink(peak, total, sink)
        inverse = v_factor / tl.where(total > 0, total, 1.0)
        out = acc * (shrink * inverse)[:, None]
        out = tl.where((total > 0)[:, None], out, 0.0)
        out_row = ((row0 + token) * out_token + head.to(tl.int64) * out_head) * UNIT
        out_at = out_ptr + out_row[:, None] + dv[None, :]
        out_ok = row_ok[:, None] & (dv < DV)[None, :]
        tl.store(out_at, stored(out, out_ptr.dtype.element_ty, UPCAST), mask=out_ok)
        lse = tl.where(total > 0, (peak + tl.log2(tl.where(total > 0, total, 1.0))) * LN2, float("-inf"))
        tl.store(lse_ptr + (row0 + token) * lse_token + head, lse, mask=row_ok & (want_lse != 0))
    else:
        safe_total = tl.where(total > 0, total, 1.0)
        slot = (partial * tl.num_programs(1) + y) * BLOCK_M + r
        tl.store(partial_ptr + slot[:, None] * DVP + dv[None, :], acc * (v_factor / safe_total)[:, None])
        tl.store(partial_lse_ptr + slot, tl.where(total > 0, peak + tl.log2(safe_total), float("-inf")))


@triton.jit(do_not_specialize=LOOSE_IN_MERGE)
def merge_splits(
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    merge_ptr,
    out_ptr,
    lse_ptr,
    want_lse,
    out_token,
    out_head,
    lse_token,
    group,
    heads,
    tiles_per_head,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UNIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The partial results of one tile, weighted by their log-sum-exps.

    A merge is (row, queries, first partial, partials).
    """
    item, y = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(merge_ptr + item * 4).to(tl.int64)
    count, partial0 = tl.load(merge_ptr + item * 4 + 1), tl.load(merge_ptr + item * 4 + 2)
    partials = tl.load(merge_ptr + item * 4 + 3)
    r, dv = tl.arange(0, BLOCK_M), tl.arange(0, DVP)
    kv_head = y // tiles_per_head
    in_group = (y % tiles_per_head) * heads + r % heads
    token, head = r // heads, kv_head * group + in_group
    row_ok = (token < count) & (in_group < group)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, DVP], 0.0, tl.float32)
    for i in range(partials):
        slot = ((partial0 + i).to(tl.int64) * tl.num_programs(1) + y) * BLOCK_M + r
        lse = tl.load(partial_lse_ptr + slot)
        out = tl.load(partial_ptr + slot[:, None] * DVP + dv[None, :])
        top = tl.maximum(peak, lse)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight, shrink = tl.exp2(lse - safe), tl.exp2(peak - safe)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + out * weight[:, None]
        peak = top

    sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")) * LOG2E
    peak, total, shrink = with_sink(peak, total, sink)
    safe_total = tl.where(total > 0, total, 1.0)
    out = tl.where((total > 0)[:, None], acc * (shrink / safe_total)[:, None], 0.0)
    out_row = ((row0 + token) * out_token + head.to(tl.int64) * out_head) * UNIT
    out_at = out_ptr + out_row[:, None] + dv[None, :]
    out_ok = row_ok[:, None] & (dv < DV)[None, :]
    tl.store(out_at, stored(out, out_ptr.dtype.element_ty, UPCAST), mask=out_ok)
    lse = tl.where(total > 0, (peak + tl.log2(safe_total)) * LN2, float("-inf"))
    tl.store(lse_ptr + (row0 + token) * lse_token + head, lse, mask=row_ok & (want_lse != 0))
