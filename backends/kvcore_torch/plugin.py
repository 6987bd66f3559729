"""Entry point of the torch backend."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.backend import BackendSpec, hookimpl
from kvcore_torch.declaration import TorchBackendSpec


@hookimpl
def kvcore_backends() -> Sequence[type[BackendSpec]]:
    """The torch backend."""
    return (TorchBackendSpec,)
