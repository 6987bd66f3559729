"""`Launcher`: runs a Triton kernel, compiled for the device or interpreted on the host.

The interpreter is chosen here, by hand, and not by an environment variable: one process can interpret
kernels, compile them ahead of time, and check their launches.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from kvcore.errors import BackendUnavailableError

Grid = tuple[int, ...]


class Launcher:
    """Runs kernels.

    Args:
        interpret: Interpret the kernel's source on CPU tensors: slow, for finding faults.
    """

    def __init__(self, *, interpret: bool = False) -> None:
        self.interpret = interpret

    def __call__(self, kernel: Any, grid: Grid, args: Mapping[str, Any], **options: int) -> None:
        """Launch `kernel`.

        Args:
            kernel: A function under `triton.jit`.
            grid: Programs along each axis; nothing runs where one is 0.
            args: Every argument of the kernel by name, compile-time constants included.
            options: How it is compiled: ``num_warps``, ``num_stages``, ``maxnreg``.
        """
        if 0 in grid:
            return
        if self.interpret:
            alone = {name: _alias(value) for name, value in args.items()}
            with _reductions():
                interpreted(kernel)[grid](**alone)
        else:
            kernel[grid](**args, **options)


def launcher_for(device: torch.device, interpret: bool) -> Launcher | None:
    """The launcher for tensors on `device`, or None where the torch twin serves."""
    if not interpret and device.type != "cuda":
        return None
    return Launcher(interpret=interpret)


@lru_cache(maxsize=64)
def interpreted(kernel: Any) -> Any:
    """`kernel` for the interpreter, the helpers that it calls included.

    Raises:
        BackendUnavailableError: Triton is not installed.
    """
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise BackendUnavailableError(
            "Triton is not installed", field="interpret", got=True, remedy="pip install 'kvcore[triton]'"
        ) from error

    def plain(function: Any) -> Any:
        # A function with globals of its own, in which helpers under `triton.jit` are interpreted too.
        own = dict(function.__globals__)
        for name in function.__code__.co_names:
            if isinstance(own.get(name), JITFunction):
                own[name] = InterpretedFunction(plain(own[name].fn)).rewrite()
        made = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__)
        made.__annotations__ = function.__annotations__
        return made

    return InterpretedFunction(plain(kernel.fn))


@contextmanager
def _reductions() -> Iterator[None]:
    """`tl.max` and `tl.sum` for the interpreter.

    They are themselves under `triton.jit`, and become callable on the host only in a process that was
    started to interpret; `tl.reduce` over their combining functions is what they come down to.
    """
    import triton.language as tl

    kept = {"max": tl.max, "sum": tl.sum}
    highest, plus = tl.standard._elementwise_max, tl.standard._sum_combine
    tl.max = lambda value, axis: tl.reduce(value, axis, highest)
    tl.sum = lambda value, axis: tl.reduce(value, axis, plus)
    try:
        yield
    finally:
        tl.max, tl.sum = kept["max"], kept["sum"]


def _alias(value: Any) -> Any:
    """A tensor of one element at the same address.

    The interpreter copies the whole storage of every argument back onto itself after a launch, which for
    an arena would be gigabytes; and a view's storage is the arena.
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    window = (ctypes.c_char * value.itemsize).from_address(value.data_ptr())
    return torch.frombuffer(window, dtype=torch.uint8).view(value.dtype)
