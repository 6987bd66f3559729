"""Stands in for ``flash_attn_2_cuda`` of flash-attn 2.8: its two paged entry points."""

# Names and order of the arguments are those of the C++ functions; they are called by position.
from __future__ import annotations

import torch

from kvcore_flash_attn.emulation.attention import attend, pages, settle
from kvcore_flash_attn.emulation.checks import (
    check,
    check_halves,
    check_heads,
    check_int32,
    check_pages,
    check_shape,
    check_slopes,
)

Tensor = torch.Tensor


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: object,
) -> list[Tensor]:
    """Sequences of any lengths over pages.

    Returns:
        Outputs [T, H, D], log-sum-exps [H, T], no probabilities, a random state.
    """
    check_halves(q, k, v)
    check_int32(cu_seqlens_q, "cu_seqlens_q")
    check_int32(cu_seqlens_k, "cu_seqlens_k")
    check(block_table_ is not None, "emulation: only paged keys and values are emulated")
    table: Tensor = block_table_  # type: ignore[assignment]
    check(softcap <= 0 or p_dropout == 0, "Softcapping does not support dropout for now")
    check(not return_softmax or p_dropout > 0, "return_softmax is only supported when p_dropout > 0.0")
    check(leftpad_k_ is None, "We don't support Paged KV and leftpad_k running at the same time yet")
    check(p_dropout == 0 and seqused_k is None, "emulation: dropout and seqused_k are not emulated")
    batch, (tokens, heads, dim) = cu_seqlens_q.numel() - 1, q.shape
    check_heads(batch, dim, heads, k.size(2))
    check(dim % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check_pages(table, k, v, batch, dim)
    check_shape(cu_seqlens_k, "cu_seqlens_k", batch + 1)
    slopes = check_slopes(alibi_slopes_, batch, heads)
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check(starts[0] == 0 and starts[-1] == tokens, "emulation: cu_seqlens_q does not cover the queries")
    call = settle(
        softmax_scale,
        softcap,
        is_causal,
        window_size_left,
        window_size_right,
        one_query=max_seqlen_q == 1,
        alibi=slopes is not None,
        width=max_seqlen_k,
    )
    out = torch.empty_like(q) if out_ is None else out_
    lse = torch.empty(heads, tokens, dtype=torch.float32)
    for b in range(batch):
        rows, count = slice(starts[b], starts[b + 1]), ends[b + 1] - ends[b]
        check(rows.stop - rows.start <= max_seqlen_q, "emulation: max_seqlen_q is too small, the grid short")
        check(0 <= count <= max_seqlen_k, "emulation: max_seqlen_k is too small, the grid short")
        own = None if slopes is None else slopes[b]
        out[rows], lse[:, rows] = attend(q[rows], pages(k, table[b], count), pages(v, table[b], count), call, own)
    return [out, lse, torch.empty(0, dtype=q.dtype), torch.zeros(2, dtype=torch.int64)]


def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k_: Tensor | None,
    v_: Tensor | None,
    seqlens_k_: Tensor | None,
    rotary_cos_: Tensor | None,
    rotary_sin_: Tensor | None,
    cache_batch_idx_: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    out_: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """Sequences of one query length over pages.

    Returns:
        Outputs [B, Q, H, D] and log-sum-exps [B, H, Q].
    """
    check_halves(q, kcache, vcache)
    check(block_table_ is not None, "emulation: only paged keys and values are emulated")
    table: Tensor = block_table_  # type: ignore[assignment]
    check(cache_batch_idx_ is None, "Paged KVcache does not support cache_batch_idx")
    batch, queries, heads, dim = q.shape
    check_heads(batch, dim, heads, kcache.size(2))
    check_pages(table, kcache, vcache, batch, dim)
    check(seqlens_k_ is not None, "emulation: without lengths every sequence would fill its table")
    lengths: Tensor = seqlens_k_  # type: ignore[assignment]
    check_int32(lengths, "seqlens_k")
    check_shape(lengths, "seqlens_k", batch)
    check(leftpad_k_ is None, "We don't support Paged KV and leftpad_k running at the same time yet")
    check(
        k_ is None and v_ is None and rotary_cos_ is None and rotary_sin_ is None,
        "emulation: new keys and rotary embedding are not emulated",
    )
    check(num_splits <= 128, "num_splits > 128 not supported")
    slopes = check_slopes(alibi_slopes_, batch, heads)
    call = settle(
        softmax_scale,
        softcap,
        is_causal,
        window_size_left,
        window_size_right,
        one_query=queries == 1,
        alibi=slopes is not None,
        width=table.size(1) * kcache.size(1),
    )
    out = torch.empty_like(q) if out_ is None else out_
    lse = torch.empty(batch, heads, queries, dtype=torch.float32)
    for b, count in enumerate(lengths.tolist()):
        own = None if slopes is None else slopes[b]
        out[b], lse[b] = attend(q[b], pages(kcache, table[b], count), pages(vcache, table[b], count), call, own)
    return [out, lse]
