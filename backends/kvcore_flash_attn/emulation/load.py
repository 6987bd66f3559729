"""Loads flash_attn's own Python over the emulated extension, and leaves `sys.modules` as it was."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from threading import Lock
from types import ModuleType

from kvcore.backend import BackendUnavailableError
from kvcore_flash_attn.emulation import extension
from kvcore_flash_attn.variants import Variant

_LOCK = Lock()


@cache
def load_interface(variant: Variant) -> ModuleType:
    """The interface module of flash_attn, bound to the emulated extension.

    It is a private copy: `import flash_attn` elsewhere finds what it found before.

    Raises:
        BackendUnavailableError: flash_attn runs with its real kernels in this process already; both
            register the same names with torch.
    """
    package = variant.module.partition(".")[0]
    with _LOCK:
        if variant.module in sys.modules:
            raise BackendUnavailableError(
                "flash_attn is loaded in this process already; its emulation needs one of its own",
                field="backends.flash_attn.emulate",
                got=True,
                allowed=False,
                remedy="start a new process, or leave emulate off",
            )
        kept = {name: module for name, module in sys.modules.items() if _belongs(name, package, variant)}
        sys.modules[variant.extension] = extension
        try:
            module = importlib.import_module(variant.module)
        finally:
            for name in [n for n in sys.modules if _belongs(n, package, variant)]:
                del sys.modules[name]
            sys.modules.update(kept)
    # The operator is registered for CUDA alone; on a CPU its own body serves.
    operator = module._flash_attn_varlen_forward
    operator.register_kernel("cpu")(operator._init_fn)
    return module


def _belongs(name: str, package: str, variant: Variant) -> bool:
    return name == package or name.startswith(package + ".") or name == variant.extension
