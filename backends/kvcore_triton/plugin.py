"""Entry point of the Triton backend."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.backend import BackendSpec, hookimpl
from kvcore_triton.declaration import TritonBackendSpec


@hookimpl
def kvcore_backends() -> Sequence[type[BackendSpec]]:
    """The Triton backend."""
    return (TritonBackendSpec,)
