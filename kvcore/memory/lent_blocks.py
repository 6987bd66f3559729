"""Blocks, tables and lengths that somebody else keeps, as a backend of ours takes them: views and a `Batch`."""

from __future__ import annotations

import numpy as np
import torch

from kvcore.attention.batch import Batch, GroupBatch, Int32Array
from kvcore.errors import LayoutError
from kvcore.memory.dtypes import torch_dtype
from kvcore.spec.layout import SizedLayout


def block_views(blocks: torch.Tensor, layout: SizedLayout) -> dict[str, torch.Tensor]:
    """The fields of one layer over blocks that somebody else allocated.

    Args:
        blocks: [N, ...] of any dtype: block n is one run of `layout.kernel_page_bytes` bytes, which begins at
            ``blocks[n]``. How the other axes are cut is not looked at.
        layout: How the fields lie in a block; not one whose fields come first.

    Returns:
        By field, [N, *axes in the layout's memory order] over the same bytes.

    Raises:
        LayoutError: The layout is field-first, or elements would not be aligned to their own size.
    """
    if layout.field_first:
        raise LayoutError(
            "the blocks of this layout are no single runs of bytes",
            field="layout",
            got=layout.layout.name,
            allowed="block-first layouts",
        )
    width, count = blocks.element_size(), blocks.shape[0]
    stride, base = blocks.stride(0) * width, blocks.storage_offset() * width
    raw = torch.empty(0, dtype=torch.int8, device=blocks.device).set_(blocks.untyped_storage())
    views = {}
    for place in layout.places:
        element = torch_dtype(place.dtype)
        steps = (stride, *place.strides)
        start = base + place.offset
        if any(number % element.itemsize for number in (start, *steps)):
            raise LayoutError(
                f"field {place.name} would not be aligned to its elements in these blocks",
                field=place.name,
                got={"offset": start, "strides": steps},
                allowed=f"multiples of {element.itemsize} bytes",
            )
        whole = raw[: raw.numel() // element.itemsize * element.itemsize].view(element)
        views[place.name] = whole.as_strided(
            (count, *place.shape), [s // element.itemsize for s in steps], start // element.itemsize
        )
    return views


def batch_of_tables(
    *,
    query_start_loc: torch.Tensor,
    query_start_loc_host: Int32Array,
    seq_lens: torch.Tensor,
    seq_lens_host: Int32Array,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    capacity_seqs: int,
    capacity_tokens: int,
) -> Batch:
    """One step of one KV group from tables that begin at block 0 of every sequence.

    Args:
        query_start_loc: int32 [S + 1] prefix sums of the scheduled tokens.
        query_start_loc_host: The same on the host.
        seq_lens: int32 [S] tokens of each sequence after the step.
        seq_lens_host: The same on the host.
        block_table: int32 [>= S, columns] kernel block ids; those that a window has left behind may be null blocks.
        slot_mapping: int64 [>= T] slot of each token, -1 where nothing is to be written.
        block_size: Tokens of a kernel block.
        capacity_seqs: The most sequences that a step of this engine has.
        capacity_tokens: The most tokens, likewise.
    """
    starts = query_start_loc_host.astype(np.int32, copy=False)
    lens = seq_lens_host.astype(np.int32, copy=False)
    tokens, scheduled = int(starts[-1]), np.diff(starts)
    computed = lens - scheduled
    counts = (-(-lens // block_size)).astype(np.int32)
    table = block_table[: len(lens), : max(1, int(counts.max(initial=0)))]
    first = np.zeros_like(lens)
    device = seq_lens.device
    part = GroupBatch(
        kernel_block_size=block_size,
        block_table_SN=table,
        counts=_on(device, counts),
        first_block=_on(device, first),
        kv_lens=seq_lens,
        slot_mapping_T=slot_mapping[:tokens],
        block_table_host=table.cpu().numpy(),
        counts_host=counts,
        first_block_host=first,
        kv_lens_host=lens,
    )
    decodes = (scheduled == 1) & (computed > 0)
    return Batch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_computed=_on(device, computed),
        query_start_loc_host=starts,
        seq_lens_host=lens,
        num_computed_host=computed,
        groups=(part,),
        num_tokens=tokens,
        num_decodes=len(lens) if decodes.all() else int(np.argmin(decodes)),
        max_query_len=int(scheduled.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        padded_tokens=tokens,
        capacity_seqs=capacity_seqs,
        capacity_tokens=capacity_tokens,
    )


def _on(device: torch.device, numbers: Int32Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
