"""Plans one step of one attention group: page tables, and the wrappers that its layers run.

A wrapper holds one plan, and all attention groups are planned before the first layer runs: each group has
wrappers of its own. The scratch memory is used only while a kernel runs, and is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.backend import (
    AttentionGroup,
    BackendUnsupportedError,
    Batch,
    GroupBatch,
    IntegrityError,
    SlotWriter,
    torch_dtype,
)
from kvcore_flashinfer.library import Library
from kvcore_flashinfer.options import PAGE_SIZES, FlashInferOptions, use_tensor_cores
from kvcore_flashinfer.tables import PageTable, page_table

# Wrappers that are kept for later steps: many more than a model has groups. A step holds its own, so that
# forgetting one never takes a plan away.
KEPT = 64
# The kernels of compute capability 8.0: they take fp8 caches under half-precision queries, later ones do not.
KERNELS = "fa2"


@dataclass(frozen=True)
class WrapperCall:
    """Neighbouring sequences that one planned wrapper serves.

    Attributes:
        tokens: Their rows in the flat batch.
        wrapper: Planned for this step.
        empty_t: int64 rows, counted from the first of `tokens`, that see no key; or None.
    """

    tokens: slice
    wrapper: Any
    empty_t: torch.Tensor | None


@dataclass(frozen=True)
class WrapperPlan:
    """Metadata of the backend.

    Attributes:
        calls: What `attend` works through.
        writer: Where the step's tokens go.
    """

    calls: tuple[WrapperCall, ...]
    writer: SlotWriter


class Planner:
    """Makes and keeps wrappers, and plans them.

    Args:
        library: The wrapper classes.
        options: Options of the backend.
        device: Where kernels run.
    """

    def __init__(self, library: Library, options: FlashInferOptions, device: torch.device) -> None:
        self.library, self.options, self.device = library, options, device
        # The library wants zeros at first use.
        self._workspace = torch.zeros(options.workspace_bytes, dtype=torch.uint8, device=device)
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def plan(self, batch: Batch, group: AttentionGroup) -> WrapperPlan:
        """Everything that does not depend on the layer.

        Raises:
            LayoutError, BackendUnsupportedError: The layout or page size is not one that was offered.
            IntegrityError: Tables or lengths are not int32.
        """
        part = batch.groups[group.kv_group]
        order = check(part, group)
        decodes, seqs = batch.num_decodes, batch.num_seqs
        calls = []
        with self.library.active():
            if decodes:
                calls.append(self._decode(batch, part, group, order, decodes))
            if decodes < seqs:
                calls.append(self._prefill(batch, part, group, order, decodes))
        return WrapperPlan(tuple(calls), SlotWriter(part.slot_mapping_T, group.layout))

    def _decode(self, batch: Batch, part: GroupBatch, group: AttentionGroup, order: str, count: int) -> WrapperCall:
        query, table = group.query, page_table(part, 0, count, self.device)
        wrapper = self._wrapper("decode", group, order)
        wrapper.plan(
            indptr=table.indptr,
            indices=table.indices,
            last_page_len=table.last_page_len,
            num_qo_heads=query.num_heads,
            num_kv_heads=query.num_kv_heads,
            head_dim=query.head_dim,
            page_size=part.kernel_block_size,
            **self._facts(group),
        )
        return WrapperCall(slice(0, count), wrapper, self._empty(table))

    def _prefill(self, batch: Batch, part: GroupBatch, group: AttentionGroup, order: str, first: int) -> WrapperCall:
        query, starts = group.query, batch.query_start_loc_host
        table = page_table(part, first, batch.num_seqs, self.device)
        wrapper = self._wrapper("prefill", group, order)
        wrapper.plan(
            qo_indptr=torch.from_numpy(starts[first:] - starts[first]),
            paged_kv_indptr=table.indptr,
            paged_kv_indices=table.indices,
            paged_kv_last_page_len=table.last_page_len,
            num_qo_heads=query.num_heads,
            num_kv_heads=query.num_kv_heads,
            head_dim_qk=query.head_dim,
            page_size=part.kernel_block_size,
            causal=query.mask.causal,
            **self._facts(group),
        )
        # A sequence that is not a decode has written keys of its own: none of its rows is empty.
        return WrapperCall(slice(int(starts[first]), int(starts[-1])), wrapper, None)

    def _facts(self, group: AttentionGroup) -> dict[str, Any]:
        query = group.query
        return {
            "window_left": -1 if query.mask.keys_before is None else query.mask.keys_before,
            "logits_soft_cap": query.softcap or 0.0,
            "sm_scale": query.softmax_scale,
            "q_data_type": torch_dtype(query.dtype),
            "kv_data_type": torch_dtype(query.cache_dtype),
        }

    def _wrapper(self, phase: str, group: AttentionGroup, order: str) -> Any:
        key = (phase, group.kv_group, group.query, order)
        if key not in self._kept:
            if phase == "decode":
                cores = use_tensor_cores(group.query, self.options)
                made = self.library.decode(
                    float_workspace_buffer=self._workspace, kv_layout=order, use_tensor_cores=cores, backend=KERNELS
                )
            else:
                made = self.library.prefill(float_workspace_buffer=self._workspace, kv_layout=order, backend=KERNELS)
            self._kept[key] = made
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _empty(self, table: PageTable) -> torch.Tensor | None:
        rows = (table.last_page_len == 0).nonzero().squeeze(1)
        return rows.to(self.device) if len(rows) else None


def check(part: GroupBatch, group: AttentionGroup) -> str:
    """The library's name of the axis order, once the layout is one of those it reads.

    Raises:
        LayoutError: The layout is not one that was offered.
        BackendUnsupportedError: The page size is not.
        IntegrityError: Tables or lengths are not int32: prefill would read them as such all the same.
    """
    order = group.layout.layout.kv_order("nhd", "hnd").upper()
    if part.kernel_block_size not in PAGE_SIZES:
        raise BackendUnsupportedError(
            "FlashInfer's pages have other sizes",
            field="kernel_block_size",
            got=part.kernel_block_size,
            allowed=list(PAGE_SIZES),
        )
    for name in ("block_table_host", "kv_lens_host"):
        dtype = getattr(part, name).dtype
        if dtype != "int32":
            raise IntegrityError("tables and lengths are int32", field=name, got=str(dtype), allowed="int32")
    return order
