"""The checks of the compiled extension, with its texts. What it does not check says ``emulation:``."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)


def check(condition: bool, text: str) -> None:
    """Raise `RuntimeError`, as a failed TORCH_CHECK does."""
    if not condition:
        raise RuntimeError(text)


def check_shape(tensor: torch.Tensor, name: str, *shape: int) -> None:
    """The shape of a tensor."""
    shown = ", ".join(map(str, shape))
    check(tuple(tensor.shape) == shape, f"{name} must have shape ({shown}), got {tuple(tensor.shape)}")


def check_int32(tensor: torch.Tensor, name: str, *, contiguous: bool = True) -> None:
    """An index tensor."""
    check(tensor.dtype == torch.int32, f"{name} must have dtype int32")
    check(not contiguous or tensor.is_contiguous(), f"{name} must be contiguous")


def check_halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Dtypes and last strides of the three operands."""
    check(q.dtype in HALVES, "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    for tensor in (q, k, v):
        check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(tensor.device == q.device, "emulation: tensors lie on several devices")


def check_pages(table: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, dim: int) -> None:
    """Tables and pages."""
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(k.size(1) % 256 == 0, "Paged KV cache block size must be divisible by 256")
    check_shape(k, "k", k.size(0), k.size(1), k.size(2), dim)
    check_shape(v, "v", k.size(0), k.size(1), k.size(2), dim)
    check_shape(table, "block_table", batch, table.size(1))


def check_heads(batch: int, dim: int, heads: int, kv_heads: int) -> None:
    """Head counts and dimension."""
    check(batch > 0, "batch size must be positive")
    check(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")


def check_slopes(slopes: torch.Tensor | None, batch: int, heads: int) -> torch.Tensor | None:
    """ALiBi slopes as [batch, heads]."""
    if slopes is None:
        return None
    check(slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32")
    check(slopes.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension")
    check(tuple(slopes.shape) in ((heads,), (batch, heads)), "emulation: alibi_slopes must be (H) or (B, H)")
    return slopes.expand(batch, heads) if slopes.dim() == 1 else slopes
