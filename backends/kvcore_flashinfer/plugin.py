"""Entry point of the FlashInfer backend."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.backend import BackendSpec, hookimpl
from kvcore_flashinfer.declaration import FlashInferBackendSpec


@hookimpl
def kvcore_backends() -> Sequence[type[BackendSpec]]:
    """The FlashInfer backend."""
    return (FlashInferBackendSpec,)
