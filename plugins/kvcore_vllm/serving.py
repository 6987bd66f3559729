"""Which backend was asked for, and what it can do with a layer's blocks. One answer a process."""

from __future__ import annotations

import os
from functools import cache

from kvcore.backend import AttentionQuery, KernelBlocks
from kvcore.cache import ServingBackend

BACKEND, OPTIONS = "KVCORE_BACKEND", "KVCORE_OPTIONS"


def asked_for() -> str:
    """The name in `KVCORE_BACKEND`; empty where there is none."""
    return os.environ.get(BACKEND, "")


def chosen() -> ServingBackend:
    """The backend that was asked for, with the overrides in `KVCORE_OPTIONS`.

    Raises:
        KVCoreError: As `ServingBackend.named`.
    """
    return _named(asked_for(), os.environ.get(OPTIONS, ""))


@cache
def _named(name: str, overrides: str) -> ServingBackend:
    return ServingBackend.named(name, *overrides.split())


@cache
def kernel_blocks(serving: ServingBackend, query: AttentionQuery) -> tuple[KernelBlocks, ...]:
    """Block sizes of every layout that may lie in vLLM's blocks, in order of preference.

    Raises:
        BackendUnavailableError, BackendUnsupportedError: The backend is missing here, or cannot serve this query.
    """
    return tuple(option.kernel_blocks for option in serving.layouts(query))
