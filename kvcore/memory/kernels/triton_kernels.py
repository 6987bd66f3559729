"""The Triton kernels of the core: slot mapping, block copy, zero, plain cache write.

Imported only where one of them is launched. Block ids are widened to 64 bits before they meet a stride.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_of(table_row_ptr, first_block, position, block_size, columns, world, rank, ok):
    """The slot of each position, -1 where another rank owns it or `ok` is false."""
    local = position // world
    column = tl.minimum((local // block_size - first_block).to(tl.int32), columns - 1)
    block = tl.load(table_row_ptr + column, mask=ok, other=0).to(tl.int64)
    slot = block * block_size + local % block_size
    return tl.where(ok & (position % world == rank), slot, -1)


@triton.jit(do_not_specialize=["seqs", "total", "columns"])
def slots_of_sequences(
    table_ptr,
    table_stride,
    first_block_ptr,
    starts_ptr,
    computed_ptr,
    out_ptr,
    seqs,
    total,
    block_size,
    columns,
    world,
    rank,
    BLOCK: tl.constexpr,
):
    """One program a sequence, from query starts; the last program makes the padding -1."""
    s = tl.program_id(0)
    begin = tl.load(starts_ptr + s)
    if s == seqs:
        for start in range(begin, total, BLOCK):
            t = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + t, tl.full([BLOCK], -1, tl.int64), mask=t < total)
    else:
        end = tl.load(starts_ptr + s + 1)
        computed = tl.load(computed_ptr + s)
        first = tl.load(first_block_ptr + s)
        row_ptr = table_ptr + s.to(tl.int64) * table_stride
        for start in range(begin, end, BLOCK):
            t = start + tl.arange(0, BLOCK)
            ok = t < end
            position = (t - begin + computed).to(tl.int64)
            slot = slot_of(row_ptr, first, position, block_size, columns, world, rank, ok)
            tl.store(out_ptr + t, slot, mask=ok)


@triton.jit(do_not_specialize=["width", "runs"])
def copy_pieces(
    source_ptr,
    target_ptr,
    from_ptr,
    to_ptr,
    source_layer,
    source_run,
    source_block,
    target_layer,
    target_run,
    target_block,
    runs,
    width,
    BLOCK: tl.constexpr,
):
    """One program: one run of one block in one layer, from source to target; units of the pointers' type."""
    n, piece = tl.program_id(0), tl.program_id(1)
    layer, run = (piece // runs).to(tl.int64), (piece % runs).to(tl.int64)
    source = tl.load(from_ptr + n).to(tl.int64) * source_block + layer * source_layer + run * source_run
    target = tl.load(to_ptr + n).to(tl.int64) * target_block + layer * target_layer + run * target_run
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part = tl.load(source_ptr + source + i, mask=i < width)
        tl.store(target_ptr + target + i, part, mask=i < width)


@triton.jit(do_not_specialize=["width", "runs"])
def zero_pieces(target_ptr, blocks_ptr, target_layer, target_run, target_block, runs, width, BLOCK: tl.constexpr):
    """One program: zeros into one run of one block in one layer."""
    n, piece = tl.program_id(0), tl.program_id(1)
    layer, run = (piece // runs).to(tl.int64), (piece % runs).to(tl.int64)
    target = tl.load(blocks_ptr + n).to(tl.int64) * target_block + layer * target_layer + run * target_run
    zeros = tl.full([BLOCK], 0, target_ptr.dtype.element_ty)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + target + i, zeros, mask=i < width)


@triton.jit(do_not_specialize=["inner", "total"])
def write_slots(
    field_ptr,
    values_ptr,
    slots_ptr,
    field_block,
    field_token,
    field_outer,
    field_inner,
    values_token,
    values_outer,
    values_inner,
    block_size,
    inner,
    total,
    BLOCK: tl.constexpr,
):
    """One program: one token into its slot; -1 writes nothing. An element is (outer, inner)."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    if slot >= 0:
        target = (slot // block_size) * field_block + (slot % block_size) * field_token
        for start in range(0, total, BLOCK):
            i = start + tl.arange(0, BLOCK)
            a, b = i // inner, i % inner
            value = tl.load(values_ptr + t * values_token + a * values_outer + b * values_inner, mask=i < total)
            tl.store(field_ptr + target + a * field_outer + b * field_inner, value, mask=i < total)
