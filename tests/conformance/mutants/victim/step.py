"""Positions and slots of one step: which keys each query sees, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcore.attention.backend import AttentionGroup
from kvcore.attention.batch import Batch, GroupBatch
from kvcore.attention.query import Mask
from kvcore.spec.layout import SizedLayout


@dataclass
class SequenceStep:
    """One sequence: rows of the flat batch, positions of its queries, positions and slots of its keys."""

    rows: slice
    query_t: torch.Tensor
    key_n: torch.Tensor
    slots_n: torch.Tensor
    seen_tn: torch.Tensor


@dataclass
class Step:
    """Metadata of the reference backend."""

    layout: SizedLayout
    size: int
    sequences: list[SequenceStep]
    write_rows: torch.Tensor
    write_slots: torch.Tensor


def plan_step(batch: Batch, group: AttentionGroup, device: torch.device) -> Step:
    """Everything that does not depend on the layer."""
    part = batch.groups[group.kv_group]
    size = part.kernel_block_size
    mask = group.query.mask
    sequences = [plan_sequence(batch, part, mask, size, s, device) for s in range(batch.num_seqs)]
    slots = part.slot_mapping_T[: batch.num_tokens]
    write_rows = (slots >= 0).nonzero().squeeze(1)
    write_slots = slots[write_rows]
    return Step(group.layout, size, sequences, write_rows, write_slots)


def plan_sequence(batch: Batch, part: GroupBatch, mask: Mask, size: int, s: int, device: torch.device) -> SequenceStep:
    """Only keys that some query sees are kept, so that nothing else is ever read."""
    start = int(batch.query_start_loc_host[s])
    stop = int(batch.query_start_loc_host[s + 1])
    length = int(batch.seq_lens_host[s])
    origin = int(part.first_block_host[s]) * size
    held = int(part.kv_lens_host[s])
    query_t = torch.arange(length - (stop - start), length, device=device)
    key_n = torch.arange(origin, origin + held, device=device)
    seen_tn = visible(mask, query_t, key_n)
    wanted = seen_tn.any(0)
    key_n = key_n[wanted]
    seen_tn = seen_tn[:, wanted]
    table = torch.from_numpy(part.block_table_host[s].astype(np.int64)).to(device)
    block_n = table[(key_n - origin) // size]
    offset_n = key_n % size
    slots_n = block_n * size + offset_n
    return SequenceStep(slice(start, stop), query_t, key_n, slots_n, seen_tn)


def visible(mask: Mask, query_t: torch.Tensor, key_n: torch.Tensor) -> torch.Tensor:
    """Bool [t, n]: whether a query sees a key."""
    i = query_t[:, None]
    j = key_n[None, :]
    seen_tn = (i == i) & (j == j)
    if mask.causal:
        seen_tn = seen_tn & (j <= i)
    if mask.window is not None:
        seen_tn = seen_tn & (j > i - mask.window)
        seen_tn = seen_tn & (j < i + mask.window)
    if mask.chunk is not None:
        seen_tn = seen_tn & (j // mask.chunk == i // mask.chunk)
    return seen_tn
