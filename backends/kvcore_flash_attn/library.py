"""The two functions of flash_attn that the adapter calls, found and checked once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

from kvcore.backend import BackendUnavailableError, require_parameters
from kvcore_flash_attn.declaration import FlashAttnBackendSpec
from kvcore_flash_attn.options import FlashAttnOptions
from kvcore_flash_attn.variants import VARIANTS


@dataclass(frozen=True)
class Library:
    """What was loaded.

    Attributes:
        with_kvcache: ``flash_attn_with_kvcache``.
        varlen: ``flash_attn_varlen_func``.
        shown: Distribution, version and, where it is one, that it is an emulation.
        page_step: Tokens that a page is a multiple of.
    """

    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]
    shown: str
    page_step: int


def load(options: FlashAttnOptions) -> Library:
    """Import the variant's functions, or their emulation.

    Raises:
        BackendUnavailableError: Package or kernels are missing, or a keyword that we pass is not taken.
    """
    reason = FlashAttnBackendSpec.unavailable(options)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend flash_attn is not available on this machine: {reason}",
            field="backend",
            got="flash_attn",
            remedy=reason,
        )
    variant = VARIANTS[options.variant]
    shown = f"{variant.distribution} {version(variant.distribution)}"
    if options.emulate:
        from kvcore_flash_attn.emulation import load_interface

        return bind(load_interface(variant), options, f"{shown}, emulation")
    return bind(importlib.import_module(variant.module), options, shown)


def bind(module: ModuleType, options: FlashAttnOptions, shown: str) -> Library:
    """The functions of a loaded module, once every keyword that we pass is known to be taken.

    Raises:
        BackendUnavailableError: A function or a keyword is missing.
    """
    variant = VARIANTS[options.variant]
    for name, keywords in variant.keywords.items():
        function = getattr(module, name, None)
        if function is None:
            raise BackendUnavailableError(
                f"{shown} has no {name}", field=name, got=shown, allowed=f"a version that has {name}"
            )
        require_parameters(function, keywords, shown=name, backend="flash_attn", version=shown)
    return Library(module.flash_attn_with_kvcache, module.flash_attn_varlen_func, shown, variant.page_step)
