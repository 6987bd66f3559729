"""The two wrappers of flashinfer that the adapter uses, found and checked once."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

from kvcore.backend import BackendUnavailableError, kvcore_home, require_parameters
from kvcore_flashinfer.declaration import DISTRIBUTION, FlashInferBackendSpec
from kvcore_flashinfer.options import FlashInferOptions

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
RUN = ("q", "paged_kv_cache", "k_scale", "v_scale", "out", "lse", "return_lse")
# Per wrapper and method, every keyword that the adapter passes.
KEYWORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    DECODE: {
        "__init__": ("float_workspace_buffer", "kv_layout", "use_tensor_cores", "backend"),
        "plan": (
            "indptr",
            "indices",
            "last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim",
            "page_size",
            "window_left",
            "logits_soft_cap",
            "q_data_type",
            "kv_data_type",
            "sm_scale",
        ),
        "run": RUN,
    },
    PREFILL: {
        "__init__": ("float_workspace_buffer", "kv_layout", "backend"),
        "plan": (
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim_qk",
            "page_size",
            "causal",
            "window_left",
            "logits_soft_cap",
            "q_data_type",
            "kv_data_type",
            "sm_scale",
        ),
        "run": RUN,
    },
}


@dataclass(frozen=True)
class Library:
    """What was loaded.

    Attributes:
        decode, prefill: The wrapper classes.
        shown: Distribution, version and, where it is one, that it is an emulation.
        active: Held while a wrapper is made or planned: there the compiled modules are looked up.
    """

    decode: Callable[..., Any]
    prefill: Callable[..., Any]
    shown: str
    active: Callable[[], AbstractContextManager[None]] = nullcontext


def load(options: FlashInferOptions) -> Library:
    """Import the wrappers, and their emulation where it is asked for.

    Raises:
        BackendUnavailableError: The package is missing, or a keyword that we pass is not taken.
    """
    reason = FlashInferBackendSpec.unavailable(options)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend flashinfer is not available on this machine: {reason}",
            field="backend",
            got="flashinfer",
            remedy=reason,
        )
    with _own_workspace():
        module = importlib.import_module("flashinfer")
    shown = f"{DISTRIBUTION} {version(DISTRIBUTION)}"
    if not options.emulate:
        return bind(module, shown)
    from kvcore_flashinfer.emulation import active

    return bind(module, f"{shown}, emulation", active)


def bind(module: ModuleType, shown: str, active: Callable[[], AbstractContextManager[None]] = nullcontext) -> Library:
    """The wrappers of a loaded module, once every keyword that we pass is known to be taken.

    Raises:
        BackendUnavailableError: A wrapper, method or keyword is missing.
    """
    for name, methods in KEYWORDS.items():
        wrapper = getattr(module, name, None)
        if wrapper is None:
            raise BackendUnavailableError(
                f"{shown} has no {name}", field=name, got=shown, allowed=f"a version that has {name}"
            )
        for method, keywords in methods.items():
            require_parameters(
                told(wrapper, method), keywords, shown=f"{name}.{method}", backend="flashinfer", version=shown
            )
    return Library(getattr(module, DECODE), getattr(module, PREFILL), shown, active)


def told(wrapper: type, method: str) -> Callable[..., Any]:
    """The function whose parameters say what `method` takes.

    From 0.7 on `plan` takes anything and hands it to `_plan_impl`, which does not.
    """
    behind = getattr(wrapper, f"_{method}_impl", None)
    found: Callable[..., Any] = getattr(wrapper, method) if behind is None else behind
    return found


@contextmanager
def _own_workspace() -> Iterator[None]:
    """The library's built kernels go to kvcore's own folder, unless the user chose another."""
    name = "FLASHINFER_WORKSPACE_BASE"
    given = os.environ.get(name)
    if given is None:
        os.environ[name] = str(kvcore_home() / "flashinfer")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]
