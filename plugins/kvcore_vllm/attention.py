"""What vLLM asks of an attention backend before there is a layer: names, layouts, block sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvcore_vllm.builder import StepBuilder
from kvcore_vllm.facts import DTYPES
from kvcore_vllm.layer import KvcoreLayer, asked
from kvcore_vllm.serving import chosen, kernel_blocks


class KvcoreAttention(AttentionBackend):
    """The backend named by `KVCORE_BACKEND`. What it serves is asked layer by layer, when a layer is made."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = []
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The one of vLLM's own names that stands for a backend which vLLM does not know."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KvcoreLayer]:
        """A layer."""
        return KvcoreLayer

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Steps of a group."""
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Block sizes for the layers of this spec, which vLLM cuts its own blocks into.

        Without a spec the layer that was made last speaks for all; each is asked again when blocks are bound.
        """
        queries = [q for q in asked() if kv_cache_spec is None or _holds(kv_cache_spec, q)]
        if not queries:
            return [MultipleOf(1)]
        query = queries[-1]
        if kv_cache_spec is not None:
            query = replace(query, head_dim_v=kv_cache_spec.head_size_v)
        found: list[int | MultipleOf] = []
        for blocks in kernel_blocks(chosen(), query):
            found += blocks.sizes or [MultipleOf(blocks.multiple_of)]
        return found

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those where a block of a layer is one run of bytes; what is inside is the backend's own."""
        return tuple(layout for layout in KVCacheLayout if layout.is_block_compact)

    @classmethod
    def supports_sink(cls) -> bool:
        """Asked again of the layer."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Asked again of the layer."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Steps are planned from the lengths on the host."""
        return False


def _holds(spec: Any, query: Any) -> bool:
    return (spec.num_kv_heads, spec.head_size) == (query.num_kv_heads, query.head_dim)
