"""Stand in for the compiled modules: batch decode on CUDA cores, batch prefill of the fa2 kernels.

Arguments in the order of the C++ functions; they are called by position. From 0.6.13 to 0.7.4 only the
plan of prefill has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcore_flashinfer.emulation.attention import HND, Pages, Variant, attend
from kvcore_flashinfer.emulation.checks import (
    check,
    check_host,
    check_int32,
    check_outputs,
    check_planned,
    check_read_as_int32,
    check_strides,
)

Tensor = torch.Tensor
# DISPATCH_GQA_GROUP_SIZE of 0.6.13.
GROUPS = (1, 2, 3, 4, 8)
NON_CAUSAL, CAUSAL = 0, 1


@dataclass
class DecodeModule:
    """``batch_decode_with_kv_cache_...``.

    Attributes:
        name: The module's name, with all that it was compiled for.
    """

    name: str

    def plan(
        self,
        float_ws: Tensor,
        int_ws: Tensor,
        pinned_ws: Tensor,
        indptr: Tensor,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim_qk: int,
        head_dim_vo: int,
        empty_q: Tensor,
        empty_kv: Tensor,
    ) -> list[Any]:
        """The schedule: here only what `run` must agree with."""
        check_int32(indptr=indptr)
        check_host(indptr=indptr)
        check(
            head_dim_qk == head_dim_vo,
            "CUDA cores template only supports equal head dim for QK and VO, please use tensor cores "
            "template for different head dim",
        )
        group = num_qo_heads // num_kv_heads
        check(group in GROUPS, f"Unsupported group_size: {group}")
        return [batch_size, num_qo_heads, num_kv_heads, page_size]

    def run(
        self,
        float_ws: Tensor,
        int_ws: Tensor,
        plan_info: list[Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        alibi_slopes: Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        rope_rcp_scale: float,
        rope_rcp_theta: float,
    ) -> None:
        """One query a sequence."""
        check_int32(paged_kv_indptr=indptr, paged_kv_indices=indices, paged_kv_last_page_len=last_page_len)
        check_strides(k, v)
        check_outputs(q, out, lse)
        pages = Pages(k, v, indptr.tolist(), indices, last_page_len.tolist(), layout)
        check_planned(plan_info, q, len(q), pages.size, k.shape[1 if layout == HND else 2])
        variant = Variant(float(sm_scale), logits_soft_cap, window_left, causal=False)
        for b in range(len(q)):
            _store(out, lse, slice(b, b + 1), q, pages, b, variant)


@dataclass
class PrefillModule:
    """``batch_prefill_with_kv_cache_...``.

    Attributes:
        name: The module's name, with all that it was compiled for.
    """

    name: str

    def plan(
        self,
        float_ws: Tensor,
        int_ws: Tensor,
        pinned_ws: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated_ctas: int = 0,
    ) -> list[Any]:
        """The schedule: here only what `paged_run` must agree with."""
        check_host(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        check_read_as_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        check(num_qo_heads % num_kv_heads == 0, "num_qo_heads must be divisible by num_kv_heads")
        return [total_num_rows, num_qo_heads, num_kv_heads, page_size, causal, window_left]

    def paged_run(
        self,
        float_ws: Tensor,
        int_ws: Tensor,
        plan_info: list[Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        custom_mask: Tensor | None,
        mask_indptr: Tensor | None,
        alibi_slopes: Tensor | None,
        prefix_len: Tensor | None,
        token_pos: Tensor | None,
        max_item_len: Tensor | None,
        k_block_scales: Tensor | None,
        v_block_scales: Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        rope_rcp_scale: float,
        rope_rcp_theta: float,
        token_pos_len: int,
    ) -> None:
        """Sequences of any query lengths."""
        check(mask_mode in (NON_CAUSAL, CAUSAL), "emulation: custom masks are not emulated")
        check(k_block_scales is None and v_block_scales is None, "emulation: nvfp4 is not emulated")
        check_read_as_int32(qo_indptr=qo_indptr, indptr=indptr, indices=indices, last=last_page_len)
        check_strides(k, v)
        check_outputs(q, out, lse)
        pages = Pages(k, v, indptr.tolist(), indices, last_page_len.tolist(), layout)
        check_planned(plan_info, q, len(q), pages.size, k.shape[1 if layout == HND else 2])
        check(plan_info[5] == window_left, "emulation: planned with another window")
        variant = Variant(float(sm_scale), logits_soft_cap, window_left, causal=mask_mode == CAUSAL)
        starts = qo_indptr.tolist()
        check(starts[0] == 0 and starts[-1] == len(q), "emulation: qo_indptr does not cover the queries")
        for b in range(len(pages.indptr) - 1):
            _store(out, lse, slice(starts[b], starts[b + 1]), q, pages, b, variant)

    def ragged_run(self, *arguments: Any) -> None:
        """Contiguous keys and values."""
        check(False, "emulation: only paged keys and values are emulated")


class LaterPrefillModule(PrefillModule):
    """The same from 0.7 on."""

    def plan(self, *arguments: Any) -> list[Any]:
        """As before, and two more: a query length that all sequences are promised to have, or 0; a hint."""
        *known, uniform_q_len, _ = arguments
        lengths = torch.diff(known[3])
        kept = uniform_q_len == 0 or bool((lengths == uniform_q_len).all())
        check(kept, f"query lengths {lengths.tolist()}, but uniform_q_len={uniform_q_len} promises others")
        return super().plan(*known)


def _store(out: Tensor, lse: Tensor | None, rows: slice, q: Tensor, pages: Pages, b: int, variant: Variant) -> None:
    result, sums = attend(q[rows], pages, b, variant)
    out[rows] = result.to(out.dtype)
    if lse is not None:
        lse[rows] = sums
