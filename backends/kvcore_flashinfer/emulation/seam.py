"""Where the emulated modules meet flashinfer: the loader of compiled modules, for as long as it is asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch

from kvcore_flashinfer.emulation.modules import DecodeModule, LaterPrefillModule, PrefillModule

_LOCK = RLock()
# The generators of the prefill modules in 0.6 and in 0.7, where two differ in the strides that they take.
PREFILL_GENERATORS: dict[str, type] = {
    "gen_batch_prefill_module": PrefillModule,
    "_gen_batch_prefill_primary_module": LaterPrefillModule,
    "_gen_batch_prefill_independent_paged_module": LaterPrefillModule,
}


class _TorchWithoutPinning:
    """torch, as flashinfer sees it: page-locked host memory needs a driver, and none is here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        """`torch.empty` in ordinary memory."""
        found: torch.Tensor = torch.empty(*size, **keywords)
        return found


@contextmanager
def active() -> Iterator[None]:
    """While a wrapper is made or planned: its modules are emulated ones. Afterwards all is as it was.

    flashinfer keeps the modules that it has loaded for the rest of the process; emulated ones are kept here
    instead, so that it never takes one for its own.
    """
    from flashinfer import decode, prefill

    with _LOCK, ExitStack() as stack:
        swap = functools.partial(_swap, stack)
        swap(decode, "torch", _TorchWithoutPinning())
        swap(prefill, "torch", _TorchWithoutPinning())
        swap(decode, "gen_batch_decode_module", _spec(decode.get_batch_decode_uri, DecodeModule))
        for name, module in PREFILL_GENERATORS.items():
            if hasattr(prefill, name):
                swap(prefill, name, _spec(prefill.get_batch_prefill_uri, module))
        swap(decode, "get_batch_decode_module", _own_cache("decode", decode.get_batch_decode_module))
        batch_prefill = _own_cache("prefill", prefill.get_batch_prefill_module)
        swap(decode, "get_batch_prefill_module", batch_prefill)
        swap(prefill, "get_batch_prefill_module", batch_prefill)
        yield


def _swap(stack: ExitStack, owner: object, name: str, value: object) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _spec(uri: Callable[..., str], module: type) -> Callable[..., Any]:
    """Stands in for a generator of CUDA sources: what it returns is only asked to build and load."""

    def generate(*facts: Any) -> Any:
        made = module(uri(*facts))
        return SimpleNamespace(name=made.name, build_and_load=lambda: made)

    return generate


_CACHES: dict[str, Callable[..., Any]] = {}


def _own_cache(name: str, cached: Callable[..., Any]) -> Callable[..., Any]:
    """The library's function behind its process-wide cache, with a cache of our own."""
    if name not in _CACHES:
        _CACHES[name] = functools.cache(cached.__wrapped__)  # type: ignore[attr-defined]
    return _CACHES[name]
