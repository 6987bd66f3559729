"""What attention is measured against: torch's SDPA, and FlashInfer and flash-attn where they can run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from kvcore.testing.bench.problem import Problem, Shape

Call = Callable[[], object]
PAGE = 16
SDPA, FLASH_ATTN, FLASHINFER = "sdpa, contiguous", "flash_attn", "flashinfer"
NAMES = (SDPA, FLASH_ATTN, FLASHINFER)
# Longest reason that is kept: a failed build prints all that its compiler said.
REASON_CHARS = 2000


class Peers(NamedTuple):
    """What a problem is measured against.

    Attributes:
        calls: The peers that ran it, by name.
        failed: Why the others did not, by name.
    """

    calls: dict[str, Call]
    failed: dict[str, str]


def candidates(shape: Shape, device: str) -> tuple[str, ...]:
    """The peers that are made for this shape and are installed; quantized caches have none but SDPA."""
    found = [SDPA]
    if device == "cuda" and shape.dtype in ("float16", "bfloat16") and shape.quant is None:
        if find_spec("flash_attn") is not None:
            found.append(FLASH_ATTN)
        if find_spec("flashinfer") is not None and shape.query == 1:
            found.append(FLASHINFER)
    return tuple(found)


def peers(problem: Problem, names: Collection[str] = NAMES) -> Peers:
    """Those of the candidates among `names`, each run once.

    An installed library may be built for another torch or another device, and raise whatever it likes.
    """
    make = {SDPA: _sdpa, FLASH_ATTN: _flash_attn, FLASHINFER: _flashinfer}
    found = Peers({}, {})
    for name in candidates(problem.shape, problem.device):
        if name in names:
            try:
                call = make[name](problem)
                call()
                if problem.device == "cuda":
                    # A kernel that fails is heard of only here, and blamed on this peer.
                    torch.cuda.synchronize()
                found.calls[name] = call
            except Exception as error:
                found.failed[name] = reason(error)
    return found


def reason(error: Exception) -> str:
    """What went wrong, for a row."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARS]


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
    k, v = (torch.randn(columns * s.batch, page, s.kv_heads, s.head_dim, device=device).to(dtype) for _ in range(2))
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
    wrapper.plan(
        indptr,
        table.flatten(),
        last,
        s.heads,
        s.kv_heads,
        s.head_dim,
        PAGE,
        q_data_type=problem.q.dtype,
        kv_data_type=problem.q.dtype,
    )
    return lambda: wrapper.run(problem.q, (k, v))
