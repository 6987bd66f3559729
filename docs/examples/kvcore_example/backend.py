"""The backend: cache write and attention, sequence by sequence."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch, GroupBatch
from kvcore_example.spec import ExampleOptions

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Our metadata: the batch, and the block tables of the group that it was prepared for."""

    batch: Batch
    tables: GroupBatch


class ExampleBackend(AttentionBackend):
    """Reads keys through the block table and lets torch do the rest."""

    def __init__(self, options: ExampleOptions) -> None:
        self.options = options

    def prepare(self, batch: Batch, group: AttentionGroup) -> Step:
        """Once a step and attention group; all groups are prepared before the first layer runs."""
        if self.options.verbose:
            print(f"{batch.num_seqs} sequences, {batch.num_tokens} tokens")
        return Step(batch, batch.groups[group.kv_group])

    def write(
        self, layer: AttentionLayer, tensors: Tensors, cache: Tensors, batch: Batch, metadata: Step
    ) -> None:
        """Every token into its slot; slot -1 writes nothing."""
        tables = metadata.tables
        slots_T = tables.slot_mapping_T[: batch.num_tokens]
        used = slots_T >= 0
        size = tables.kernel_block_size
        for name in ("k", "v"):
            blocks_T, offsets_T = slots_T[used] // size, slots_T[used] % size
            cache[name][blocks_T, offsets_T] = tensors[name][: batch.num_tokens][used]

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensors,
        fresh: Tensors | None,
        cache: Tensors,
        metadata: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """The step's tokens are in the cache already; queries are the last ones of their sequence."""
        tables, batch = metadata.tables, metadata.batch
        starts = batch.query_start_loc_host
        for s in range(batch.num_seqs):
            first, last = int(starts[s]), int(starts[s + 1])
            # Rows of window groups hold the live tail only: column 0 is block first_block of the sequence.
            begin = int(tables.first_block_host[s]) * tables.kernel_block_size
            length = int(batch.seq_lens_host[s])
            blocks = tables.block_table_SN[s, : int(tables.counts_host[s])].long()
            k, v = (cache[n][blocks].flatten(0, 1)[: length - begin] for n in ("k", "v"))
            positions_q = torch.arange(length - (last - first), length)[:, None]
            positions_k = torch.arange(begin, length)[None, :]
            seen = positions_k <= positions_q
            if layer.query.mask.window is not None:
                seen &= positions_k > positions_q - layer.query.mask.window
            shared = layer.query.group_size
            scores = torch.einsum("qhd,khd->hqk", query["q"][first:last], k.repeat_interleave(shared, dim=1))
            scores = (scores * layer.query.softmax_scale).masked_fill(~seen, float("-inf"))
            # A slot behind the window may hold anything, and 0 * NaN is NaN: a weight of 0 is not enough.
            v = v.masked_fill(~seen.any(dim=0)[:, None, None], 0.0)
            values = v.repeat_interleave(shared, dim=1)
            out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
