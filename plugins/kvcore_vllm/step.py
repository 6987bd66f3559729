"""`Step`: what the layers of one vLLM group are told about one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.attention.backend import AttentionMetadata

from kvcore.backend import AttentionBackend


@dataclass(frozen=True)
class Step(AttentionMetadata):
    """One step of one group of vLLM, whose layers may ask unlike things.

    Attributes:
        backend: Who serves it.
        num_tokens: Tokens without padding.
        prepared: The backend's own metadata, one for each kind of layer.
    """

    backend: AttentionBackend
    num_tokens: int
    prepared: tuple[Any, ...]
