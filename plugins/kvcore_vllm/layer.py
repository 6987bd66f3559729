"""One attention layer of vLLM, served by a backend of ours."""

from __future__ import annotations

from functools import partial

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from kvcore.backend import AttentionLayer, AttentionQuery, SizedLayout
from kvcore.cache import block_views
from kvcore_vllm.facts import query_of, require_served, unserved
from kvcore_vllm.serving import chosen, kernel_blocks
from kvcore_vllm.step import Step

# The layers of this process, by what they store: vLLM asks for block sizes with a spec and no layer.
_ASKED: dict[tuple[int, int, str], AttentionQuery] = {}


def asked() -> list[AttentionQuery]:
    """What the layers ask, the last one last."""
    return list(_ASKED.values())


class KvcoreLayer(AttentionImpl[Step]):
    """Made with the model; bound to blocks once vLLM has allocated them.

    Raises:
        BackendUnavailableError, BackendUnsupportedError: The backend cannot serve this layer; says why.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: object,
    ) -> None:
        config = get_current_vllm_config()
        require_served(config)
        if attn_type != AttentionType.DECODER:
            raise unserved("attn_type", attn_type, AttentionType.DECODER.value)
        if unknown:
            raise unserved(next(iter(unknown)), "a layer that has it", "layers without")
        # The names that vLLM reads.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.shared = kv_sharing_target_layer_name is not None
        self.query = query_of(
            dtype=config.model_config.dtype,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=head_size,
            scale=self.scale,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
        )
        kernel_blocks(chosen(), self.query)
        key = (self.num_kv_heads, head_size, self.query.cache_dtype)
        _ASKED.pop(key, None)
        _ASKED[key] = self.query
        self.layout: SizedLayout | None = None
        self._blocks: torch.Tensor | None = None
        self._views: dict[str, torch.Tensor] = {}

    def bind(self, layer: AttentionLayer, layout: SizedLayout, group: int) -> None:
        """Tell the layer its own tensors, how its blocks are filled, and which group's metadata is its own."""
        self._layer, self.layout, self._group = layer, layout, group
        self._view = partial(block_views, layout=layout)
        self._blocks = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend.

        Args:
            layer: vLLM's module.
            query: [T or more, H, D].
            key: [T or more, K, D]; None where the layer reads another's cache.
            value: Likewise.
            kv_cache: The layer's kernel blocks.
            attn_metadata: The step; None in a profiling run, which has no cache.
            output: [T or more, H, Dv], written in place.
            output_scale: Of a fused quantization, which was not offered.
            output_block_scale: Likewise.
        """
        if attn_metadata is None:
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise unserved("output_scale", "a fused quantization of the output", None)
        if kv_cache is not self._blocks:
            self._blocks, self._views = kv_cache, self._view(kv_cache)
        step, tokens = attn_metadata, attn_metadata.num_tokens
        prepared = step.prepared[self._group]
        if not self._layer.shared and key is not None and value is not None:
            step.backend.write(self._layer, {"k": key[:tokens], "v": value[:tokens]}, self._views, prepared)
        step.backend.attend(self._layer, {"q": query[:tokens]}, self._views, prepared, output[:tokens])
        return output
