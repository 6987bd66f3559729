"""Entry point of the FlashAttention backend."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.backend import BackendSpec, hookimpl
from kvcore_flash_attn.declaration import FlashAttnBackendSpec


@hookimpl
def kvcore_backends() -> Sequence[type[BackendSpec]]:
    """The FlashAttention backend."""
    return (FlashAttnBackendSpec,)
