"""The index work of one step and one attention group, done once for all its layers.

A step is cut into at most two segments, because the library has one function for queries of one length and
one for any lengths:

    decodes (one query each) | the rest: of one short length, or of any lengths
    flash_attn_with_kvcache  | flash_attn_with_kvcache, or flash_attn_varlen_func

Rows of window groups hold the live tail only. Positions are then counted from its first key, and every mask
of the library is aligned to the last query and the last key, so distances are what they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from kvcore.backend import AttentionGroup, BackendUnsupportedError, Batch, GroupBatch, IntegrityError, SlotWriter

# Longest query that is given to the decode kernel when all sequences have the same: it splits keys over
# the device, the other one does not.
MULTI_TOKEN = 16


@dataclass(frozen=True)
class Segment:
    """Neighbouring sequences that one call serves.

    Attributes:
        tokens: Their rows in the flat batch.
        count: Sequences n.
        query_len: Queries of each, or 0 where lengths differ.
        table_nC: int32 [n, columns] pages.
        kv_lens_n: int32 [n] keys of each.
        query_starts: int32 [n + 1], where lengths differ.
        key_starts: int32 [n + 1], where lengths differ.
        max_query_len, max_kv_len: The longest.
        width: Keys that the library takes for the longest possible sequence: a bound that reaches further
            is none to it.
    """

    tokens: slice
    count: int
    query_len: int
    table_nC: torch.Tensor
    kv_lens_n: torch.Tensor
    query_starts: torch.Tensor | None
    key_starts: torch.Tensor | None
    max_query_len: int
    max_kv_len: int
    width: int


@dataclass(frozen=True)
class SegmentPlan:
    """Metadata of the backend.

    Attributes:
        segments: What `attend` works through.
        writer: Where the step's tokens go.
        causal: Whether later keys are hidden.
        window: (left, right) as the library counts, -1 for no bound.
    """

    segments: tuple[Segment, ...]
    writer: SlotWriter
    causal: bool
    window: tuple[int, int]


def plan_segments(batch: Batch, group: AttentionGroup, page_step: int) -> SegmentPlan:
    """Everything that does not depend on the layer.

    Raises:
        LayoutError, BackendUnsupportedError: The layout or block size is not one that was offered.
        IntegrityError: Tables or lengths are not what the kernels read them as.
    """
    part = batch.groups[group.kv_group]
    _check(part, group, page_step)
    cuts = sorted({0, batch.num_decodes, batch.num_seqs})
    segments = tuple(_segment(batch, part, a, b) for a, b in pairwise(cuts))
    mask = group.query.mask
    writer = SlotWriter(part.slot_mapping_T, group.layout)
    before, after = mask.keys_before, mask.keys_after
    window = (-1, -1) if before is None or after is None else (before, after)
    return SegmentPlan(segments, writer, mask.causal, window)


def _segment(batch: Batch, part: GroupBatch, first: int, last: int) -> Segment:
    starts = batch.query_start_loc_host
    lengths = starts[first + 1 : last + 1] - starts[first:last]
    kv_lens = part.kv_lens_host[first:last]
    longest, most = int(lengths.max()), int(kv_lens.max())
    uniform = longest == int(lengths.min()) and longest <= MULTI_TOKEN
    # The kernel's grid follows the table's width: the columns that no sequence uses are left out.
    columns = max(1, -(-most // part.kernel_block_size))
    query_starts = key_starts = None
    if not uniform:
        query_starts = batch.query_start_loc[first : last + 1] - int(starts[first])
        key_starts = torch.zeros(last - first + 1, dtype=torch.int32, device=part.kv_lens.device)
        torch.cumsum(part.kv_lens[first:last], 0, dtype=torch.int32, out=key_starts[1:])
    return Segment(
        tokens=slice(int(starts[first]), int(starts[last])),
        count=last - first,
        query_len=longest if uniform else 0,
        table_nC=part.block_table_SN[first:last, :columns],
        kv_lens_n=part.kv_lens[first:last],
        query_starts=query_starts,
        key_starts=key_starts,
        max_query_len=longest,
        max_kv_len=most,
        width=columns * part.kernel_block_size if uniform else most,
    )


def _check(part: GroupBatch, group: AttentionGroup, page_step: int) -> None:
    group.layout.layout.kv_order("nhd")
    if part.kernel_block_size % page_step:
        raise BackendUnsupportedError(
            "FlashAttention's pages hold a multiple of so many tokens",
            field="kernel_block_size",
            got=part.kernel_block_size,
            allowed=f"multiples of {page_step}",
        )
    for name in ("block_table_SN", "kv_lens"):
        tensor = getattr(part, name)
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise IntegrityError(
                "the kernels read tables and lengths as contiguous int32",
                field=name,
                got=f"{tensor.dtype}, stride {tensor.stride(-1)}",
                allowed="int32, stride 1",
            )
