"""What the vllm_cpu backend declares. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvcore.backend import (
    TOKEN,
    AttentionQuery,
    Axis,
    BackendSpec,
    Capabilities,
    DeviceFacts,
    KernelBlocks,
    KVCacheSpec,
    KVHeads,
    LayoutField,
    LayoutOption,
    PageLayout,
    Refusal,
)
from kvcore_vllm_cpu.install import AVX512, Installed, cpu_flags, look
from kvcore_vllm_cpu.options import TOKENS, VllmCpuOptions

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("fp8_e4m3", "fp8_e5m2")
# What the wheel's dispatcher has cases for (csrc/cpu/generate_cpu_attn_dispatch.py; asked one by one in the tests);
# fp8 only for multiples of 32.
HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=FLOATS,
    cache_dtypes=(*FLOATS, *FP8),
    features=("bidirectional", "window", "scale", "softcap", "alibi", "sinks", "quant"),
    head_dims=HEAD_DIMS,
    granularities=("tensor",),
)


class VllmCpuBackendSpec(BackendSpec):
    """vLLM's compiled CPU attention: keys [K, D, P] and values [K, P, D] in a block."""

    name = "vllm_cpu"
    backend = "kvcore_vllm_cpu.backend:make_backend"
    priority: ClassVar[Mapping[str, int]] = {"cpu": 50}
    Config = VllmCpuOptions
    # Who computes what is settled in `prepare`, and parts are added up in order. Not batch-invariant: where keys
    # are split between threads follows from the batch.
    deterministic = True
    # Whole passes of 16 or 32 tokens are multiplied and masked afterwards.
    reads_unwritten_slots = True
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: VllmCpuOptions) -> str | None:
        """The package, its version, a build for this CPU."""
        found = look()
        return None if isinstance(found, Installed) else found

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: VllmCpuOptions) -> Refusal | None:
        """CPUs alone."""
        return None if facts.kind == "cpu" else Refusal("device", facts.kind, "cpu")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: VllmCpuOptions) -> Refusal | None:
        """The first fact outside the table, or a combination that the kernel gets wrong or does not have."""
        refused = CAPABILITIES.check(query)
        if refused is not None:
            return refused
        if query.alibi and not query.mask.causal:
            # The kernel adds slope * (j - i), and keys after the query would be raised.
            return Refusal("alibi", True, "causal masks")
        quantized = query.cache_dtype in FP8
        if quantized != (query.quant is not None):
            return Refusal("quant", query.quant, CAPABILITIES.granularities if quantized else "none")
        if not quantized and query.cache_dtype != query.dtype:
            return Refusal("cache_dtype", query.cache_dtype, [query.dtype, *FP8])
        if quantized and (options.isa_for(query.head_dim) != "vec" or query.head_dim % 32 or not cpu_flags() >= AVX512):
            allowed = f"{query.dtype}; fp8 takes isa=vec, heads of a multiple of 32, and AVX-512"
            return Refusal("cache_dtype", query.cache_dtype, allowed)
        return None

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: VllmCpuOptions) -> Sequence[LayoutOption]:
        """Keys with their tokens innermost, block-first, then field-first."""
        content = spec.content
        if not isinstance(content, KVHeads) or content.head_dim != content.v_dim:
            return ()
        quant = content.quant
        if content.dtype not in (FLOATS if quant is None else FP8) or (quant and quant.granularity != "tensor"):
            return ()
        blocks = KernelBlocks(multiple_of=TOKENS[options.isa_for(content.head_dim)])
        head, token, dim = Axis("head", content.num_kv_heads), Axis(TOKEN, None), Axis("dim", content.head_dim)
        fields = (
            LayoutField("k", (head, dim, token), content.dtype),
            LayoutField("v", (head, token, dim), content.dtype),
        )
        # A cache line: no load of 64 bytes then lies over two of them.
        return [
            LayoutOption(PageLayout("k_columns", fields, alignment=64), blocks),
            LayoutOption(PageLayout("k_columns_kv_first", fields, "field_first", 64), blocks),
        ]
