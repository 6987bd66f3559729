"""The work of one step and one attention group that does not depend on the layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcore.backend import AttentionGroup, Batch, GroupBatch, IntegrityError, LayoutError, SlotWriter, torch_dtype
from kvcore_vllm_cpu.declaration import FP8
from kvcore_vllm_cpu.library import Library

AXES = {"k": ("head", "dim", "token"), "v": ("head", "token", "dim")}


@dataclass(frozen=True)
class WorkList:
    """Metadata of the backend.

    Attributes:
        isa: The kernel's variant.
        starts: int32 [S + 1] first query of each sequence.
        queries: The last of them: queries of the step.
        part: Tables, lengths and slots of the group.
        window: As the library counts, -1 for none. It counts the query itself, as we do.
        work: Who computes what, in the library's own format; for as many threads as there are now.
        stored: How the library calls the cache's dtype; ``auto`` is that of the queries.
        writer: Where the step's tokens go, for codes of our own.
        empty: int64 rows that see no key, or None.
    """

    isa: str
    starts: torch.Tensor
    queries: int
    part: GroupBatch
    window: int
    work: torch.Tensor
    stored: str
    writer: SlotWriter
    empty: torch.Tensor | None


def plan_work(batch: Batch, group: AttentionGroup, library: Library, isa: str) -> WorkList:
    """Everything that does not depend on the layer.

    Rows of window groups hold the live tail only: positions are then counted from its first key, and every
    mask and bias of the library is of distances.

    Raises:
        LayoutError: The layout is none that was offered.
        IntegrityError: Tables, lengths or slots are not what the library reads them as.
    """
    query, part = group.query, batch.groups[group.kv_group]
    _check(batch, part, group)
    window = -1 if query.mask.window is None else query.mask.window
    stored = query.cache_dtype if query.cache_dtype in FP8 else "auto"
    work = library.schedule(
        num_req=batch.num_seqs,
        num_heads_q=query.num_heads,
        num_heads_kv=query.num_kv_heads,
        head_dim=query.head_dim,
        seq_lens=part.kv_lens,
        dtype=torch_dtype(query.dtype),
        query_start_loc=batch.query_start_loc,
        casual=query.mask.causal,
        window_size=window,
        isa_hint=isa,
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype=stored,
    )
    writer = SlotWriter(part.slot_mapping_T, group.layout)
    starts, queries = batch.query_start_loc, int(batch.query_start_loc_host[-1])
    return WorkList(isa, starts, queries, part, window, work, stored, writer, _empty_rows(batch, part))


def _empty_rows(batch: Batch, part: GroupBatch) -> torch.Tensor | None:
    """Rows of sequences without keys: the library leaves them as they are."""
    starts = batch.query_start_loc_host
    rows = [np.arange(starts[s], starts[s + 1]) for s in (part.kv_lens_host == 0).nonzero()[0]]
    return torch.from_numpy(np.concatenate(rows)) if rows else None


def _check(batch: Batch, part: GroupBatch, group: AttentionGroup) -> None:
    """What the library would read as something else: it takes addresses, and no strides but a table's rows."""
    for f in group.layout.layout.fields:
        if f.axis_names != AXES.get(f.name):
            raise LayoutError(
                f"vLLM's CPU kernel cannot read layout {group.layout.layout.name}",
                field="layout",
                got={f.name: f.axis_names},
                allowed=AXES,
            )
    read = {
        "query_start_loc": (batch.query_start_loc, torch.int32),
        "kv_lens": (part.kv_lens, torch.int32),
        "block_table_SN": (part.block_table_SN, torch.int32),
        "slot_mapping_T": (part.slot_mapping_T, torch.int64),
    }
    for name, (tensor, dtype) in read.items():
        if tensor.dtype != dtype or (tensor.numel() > 1 and tensor.stride(-1) != 1):
            raise IntegrityError(
                "the library reads tables, lengths and slots as contiguous integers",
                field=name,
                got=f"{tensor.dtype}, stride {tensor.stride(-1)}",
                allowed=f"{dtype}, stride 1",
            )
