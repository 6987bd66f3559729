"""The backend: cache write and attention, sequence by sequence."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

import kvcore.backend as kv

Tensors = Mapping[str, torch.Tensor]


class Step(NamedTuple):
    """Our metadata: the batch, and the block tables of the group that it was prepared for."""

    batch: kv.Batch
    tables: kv.GroupBatch


class ExampleBackend(kv.AttentionBackend):
    """Reads keys through the block table and lets torch do the rest."""

    def __init__(self, device, options) -> None:
        self.x = options.x

    def prepare(self, batch: kv.Batch, group: kv.AttentionGroup) -> Step:
        return Step(batch, batch.groups[group.kv_group])

    def write(self, layer: kv.AttentionLayer, tensors: Tensors, cache: Tensors, metadata: Step) -> None:
        slots_T = metadata.tables.slot_mapping_T
        used = slots_T >= 0  # slot -1 writes nothing
        size = metadata.tables.kernel_block_size
        blocks, offsets = slots_T[used] // size, slots_T[used] % size
        k_TKD, v_TKD = (tensors[name][: len(slots_T)][used] for name in ("k", "v"))
        if "k_norm" in cache:
            norm_TK = k_TKD.norm(dim=-1)
            cache["k_norm"][blocks, :, offsets] = norm_TK
            k_TKD = k_TKD / norm_TK.clamp_min(1e-30)[..., None]
        cache["k"][blocks, :, :, offsets] = k_TKD.unflatten(-1, (-1, self.x))
        cache["v"][blocks, :, :, offsets] = v_TKD

    def attend(
        self,
        layer: kv.AttentionLayer,
        query: Tensors,
        cache: Tensors,
        metadata: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        batch, tables = metadata
        starts, shared = batch.query_start_loc_host, layer.query.group_size
        for s in range(batch.num_seqs):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            begin, length = self._span(batch, tables, s)
            blocks = tables.block_table_SN[s, : int(tables.counts_host[s])].long()
            k_jKD, v_jKD = (self._gather(n, cache, blocks)[: length - begin] for n in ("k", "v"))
            i = torch.arange(length - (rows.stop - rows.start), length)[:, None]
            j = torch.arange(begin, length)
            seen_ij = j <= i
            if layer.query.mask.window is not None:
                seen_ij &= j > i - layer.query.mask.window
            # A slot that nobody sees may hold anything, and 0 * NaN is NaN: a weight of 0 is not enough.
            v_jKD = v_jKD.masked_fill(~seen_ij.any(dim=0)[:, None, None], 0)
            q_iHD = query["q"][rows] * layer.query.softmax_scale
            scores_Hij = torch.einsum("ihd,jhd->hij", q_iHD, k_jKD.repeat_interleave(shared, dim=1))
            weights_Hij = scores_Hij.masked_fill(~seen_ij, float("-inf")).softmax(dim=-1)
            out[rows] = torch.einsum("hij,jhd->ihd", weights_Hij, v_jKD.repeat_interleave(shared, dim=1))

    @staticmethod
    def _span(batch: kv.Batch, tables: kv.GroupBatch, s: int) -> tuple[int, int]:
        """Position of the table's first token (a row holds the live tail only), and the end."""
        return int(tables.first_block_host[s]) * tables.kernel_block_size, int(batch.seq_lens_host[s])

    @staticmethod
    def _gather(name: str, cache: Tensors, blocks: torch.Tensor) -> torch.Tensor:
        """[tokens, K, D] of some blocks."""
        if name == "v":
            return cache["v"][blocks].permute(0, 3, 1, 2).flatten(0, 1)
        k = cache["k"][blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        if "k_norm" not in cache:
            return k
        return k * cache["k_norm"][blocks].transpose(1, 2).flatten(0, 1)[..., None]
