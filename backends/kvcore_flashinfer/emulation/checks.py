"""The checks of the compiled modules, with their texts. What they do not check says ``emulation:``."""

from __future__ import annotations

from typing import Any

import torch


def check(condition: bool, text: str) -> None:
    """Raise `RuntimeError`, as a failed check of the C++ does."""
    if not condition:
        raise RuntimeError(text)


def check_int32(**tensors: torch.Tensor) -> None:
    """Index tensors that the C++ checks."""
    for name, tensor in tensors.items():
        check(tensor.dtype == torch.int32, f"Inconsistency of Tensor type: {name} must be int32")


def check_read_as_int32(**tensors: torch.Tensor) -> None:
    """Index tensors that the C++ only reads as int32, whatever they are."""
    for name, tensor in tensors.items():
        check(
            tensor.dtype == torch.int32 and tensor.is_contiguous(),
            f"emulation: {name} is {tensor.dtype}; the kernel would read it as contiguous int32",
        )


def check_host(**tensors: torch.Tensor) -> None:
    """Tensors that `plan` reads on the host."""
    for name, tensor in tensors.items():
        check(tensor.device.type == "cpu", f"{name} must be a host tensor")


def check_strides(k: torch.Tensor, v: torch.Tensor) -> None:
    """Keys and values are walked with one set of strides."""
    for axis, (a, b) in enumerate(zip(k.stride(), v.stride(), strict=True)):
        check(a == b, f"k/v strides differs at {axis}")


def check_outputs(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Written through pointers; only the shape of the log-sum-exps is checked by the C++."""
    check(q.stride(-1) == 1, "emulation: the last axis of q is not contiguous")
    check(out.is_contiguous(), "emulation: the outputs are not contiguous; the kernel writes as if they were")
    if lse is not None:
        check(tuple(lse.shape) == tuple(q.shape[:2]), "lse must have one number for each query and head")
        check(lse.is_contiguous() and lse.dtype == torch.float32, "emulation: lse is not contiguous float32")


def check_planned(info: list[Any], q: torch.Tensor, rows: int, page_size: int, kv_heads: int) -> None:
    """A schedule is made for one step: run over another it reads other requests' numbers."""
    got = [rows, q.shape[1], kv_heads, page_size]
    check(info[:4] == got, f"emulation: planned for {info[:4]} (rows, heads, KV heads, page), run with {got}")
