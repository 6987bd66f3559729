"""What attention is measured against: torch's SDPA, and FlashInfer and flash-attn where they can run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from kvcore.testing.bench.problem import Problem

Call = Callable[[], object]
PAGE = 16


def peers(problem: Problem) -> dict[str, Call]:
    """The peers that can run this problem here, by name; quantized caches have none but SDPA."""
    found = {"sdpa, contiguous": _sdpa(problem)}
    half = problem.shape.dtype in ("float16", "bfloat16") and problem.shape.quant is None
    if problem.device == "cuda" and half:
        if find_spec("flash_attn") is not None:
            found |= _tried("flash_attn", lambda: _flash_attn(problem))
        if find_spec("flashinfer") is not None and problem.shape.query == 1:
            found |= _tried("flashinfer", lambda: _flashinfer(problem))
    return found


def _tried(name: str, make: Callable[[], Call]) -> dict[str, Call]:
    """The peer, unless its library is installed and cannot run (built for another torch or device)."""
    try:
        call = make()
        call()
    except (ImportError, OSError, RuntimeError, TypeError, ValueError):
        return {}
    return {name: call}


def _sdpa(problem: Problem) -> Call:
    """Grouped queries over keys that lie in one piece: what no paging costs.

    The query heads of a KV head become rows of one product; `enable_gqa` repeats the keys on a CPU.
    """
    s = problem.shape
    k, v = problem.dense()
    per_seq = problem.q.view(s.batch, s.query, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
    if s.query == 1:
        q = per_seq.transpose(1, 3).reshape(s.batch, s.heads // s.kv_heads, s.kv_heads, s.head_dim)
        q = q.transpose(1, 2).contiguous()
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    q = problem.q.view(s.batch, s.query, s.heads, s.head_dim).transpose(1, 2).contiguous()
    causal = s.query == s.context
    mask = None
    if not causal:
        rows = torch.arange(s.context - s.query, s.context, device=problem.device)
        mask = torch.arange(s.context, device=problem.device)[None] <= rows[:, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def _pages(problem: Problem, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values [pages, page, K, D] and a table int32 [batch, columns] of scattered pages."""
    s = problem.shape
    columns = -(-s.context // page)
    dtype, device = problem.q.dtype, problem.device
    k, v = (torch.randn(columns * s.batch, page, s.kv_heads, s.head_dim, device=device).to(dtype)
            for _ in range(2))  # fmt: skip
    table = torch.randperm(columns * s.batch, device=device).int().view(s.batch, columns)
    return k, v, table


def _flash_attn(problem: Problem) -> Call:
    from flash_attn import flash_attn_with_kvcache

    s = problem.shape
    k, v, table = _pages(problem, 256)
    q = problem.q.view(s.batch, s.query, s.heads, s.head_dim)
    lengths = torch.full((s.batch,), s.context, dtype=torch.int32, device=problem.device)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)


def _flashinfer(problem: Problem) -> Call:
    import flashinfer

    s = problem.shape
    k, v, table = _pages(problem, PAGE)
    columns, device = table.shape[1], problem.device
    indptr = torch.arange(0, (s.batch + 1) * columns, columns, dtype=torch.int32, device=device)
    last = torch.full((s.batch,), (s.context - 1) % PAGE + 1, dtype=torch.int32, device=device)
    room = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    wrapper.plan(indptr, table.flatten(), last, s.heads, s.kv_heads, s.head_dim, PAGE,
                 q_data_type=problem.q.dtype, kv_data_type=problem.q.dtype)  # fmt: skip
    return lambda: wrapper.run(problem.q, (k, v))
