"""Entry point of the vllm_cpu backend."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.backend import BackendSpec, hookimpl
from kvcore_vllm_cpu.declaration import VllmCpuBackendSpec


@hookimpl
def kvcore_backends() -> Sequence[type[BackendSpec]]:
    """The vllm_cpu backend."""
    return (VllmCpuBackendSpec,)
