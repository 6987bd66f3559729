"""Binds the layers of one vLLM group to its blocks, and turns vLLM's metadata into a batch of ours, once a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvcore.backend import AttentionGroup, AttentionLayer, AttentionQuery, CacheId, IntegrityError
from kvcore.cache import batch_of_tables
from kvcore_vllm.facts import unserved
from kvcore_vllm.layer import KvcoreLayer
from kvcore_vllm.serving import chosen
from kvcore_vllm.step import Step

# A child of vLLM's own logger, whose handlers and level it has.
log = logging.getLogger("vllm.kvcore")
SPECS = (FullAttentionSpec, SlidingWindowSpec)


class StepBuilder(AttentionMetadataBuilder[Step]):
    """One group of layers with one block table.

    Raises:
        BackendUnsupportedError: No layout of the backend fills just these blocks, or the group is of a kind that is
            not served.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if type(kv_cache_spec) not in SPECS:
            raise unserved("kv_cache_spec", type(kv_cache_spec).__name__, [s.__name__ for s in SPECS])
        self._init_reorder_batch_threshold(1)  # decodes first
        self.serving = chosen()
        everywhere = get_layers_from_vllm_config(vllm_config, Attention)
        numbers = {name: CacheId(i) for i, name in enumerate(everywhere)}
        members: dict[AttentionQuery, list[str]] = {}
        for name in layer_names:
            module = everywhere[name]
            members.setdefault(replace(module.impl.query, head_dim_v=module.head_size_v), []).append(name)
        self.groups: list[AttentionGroup] = []
        for query, names in members.items():
            layout = self.serving.layout(query, kv_cache_spec.block_size, kv_cache_spec.page_size_bytes)
            layers = tuple(_layer_of(everywhere[n], numbers[n], query, device) for n in names)
            for name, layer in zip(names, layers, strict=True):
                everywhere[name].impl.bind(layer, layout, len(self.groups))
            self.groups.append(AttentionGroup(0, query, layers, layout))
        _tell(self.serving.name, [module.impl for module in everywhere.values()])

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step for every layer of the group.

        Raises:
            IntegrityError: The step is not causal: nothing of it was told at start-up.
        """
        given, limits = common_attn_metadata, self.vllm_config.scheduler_config
        if given.causal is not True:
            raise IntegrityError(
                "vLLM asks for a step that is not causal", field="causal", got=given.causal, allowed=True
            )
        batch = batch_of_tables(
            query_start_loc=given.query_start_loc,
            query_start_loc_host=given.query_start_loc_cpu.numpy(),
            seq_lens=given.seq_lens,
            seq_lens_host=given.seq_lens.cpu().numpy(),
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            block_size=self.kv_cache_spec.block_size,
            capacity_seqs=limits.max_num_seqs,
            capacity_tokens=limits.max_num_batched_tokens,
        )
        backend = self.serving.backend
        return Step(backend, batch.num_tokens, tuple(backend.prepare(batch, group) for group in self.groups))


def _layer_of(module: Any, cache_id: CacheId, query: AttentionQuery, device: torch.device) -> AttentionLayer:
    """A layer with its own tensors; the weights are loaded by now."""
    impl: KvcoreLayer = module.impl
    own = {}
    if impl.alibi_slopes is not None:
        own["alibi_slopes"] = torch.tensor(impl.alibi_slopes, dtype=torch.float32, device=device)
    if impl.sinks is not None:
        own["sinks"] = impl.sinks.detach().float()
    if query.quant is not None:
        own |= {"k_scale": module._k_scale.float(), "v_scale": module._v_scale.float()}
    return AttentionLayer(cache_id, query, **own, shared=impl.shared)


def _tell(backend: str, layers: Sequence[KvcoreLayer]) -> None:
    """One line, once the last layer of the model is bound."""
    layouts = {layer.layout for layer in layers}
    if None not in layouts:
        shown = sorted(f"{x.layout.name} in blocks of {x.kernel_block_size} tokens" for x in layouts if x is not None)
        log.info("kvcore's backend %s serves %d layers: layout %s", backend, len(layers), "; ".join(shown))
