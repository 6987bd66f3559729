"""The variants of FlashAttention: which package each is, what it serves, and which keywords we pass.

FlashAttention 3 and 4 are other packages with other functions. Each needs a `Variant` of its own, with its
own capabilities: what it can do more must not be granted to FlashAttention 2. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.backend import Capabilities


@dataclass(frozen=True, eq=False)
class Variant:
    """One generation of the library.

    Attributes:
        distribution: The distribution on the package index.
        versions: [lowest, below) as version tuples.
        module: Where the functions are.
        extension: The compiled module, without which nothing can run.
        page_step: Pages hold a multiple of so many tokens.
        lowest_capability: CUDA compute capability.
        capabilities: What it serves.
        keywords: Per function, every keyword that the adapter passes.
    """

    distribution: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    module: str
    extension: str
    page_step: int
    lowest_capability: tuple[int, int]
    capabilities: Capabilities
    keywords: Mapping[str, tuple[str, ...]]


FA2 = Variant(
    distribution="flash-attn",
    versions=((2, 8), (3,)),
    module="flash_attn.flash_attn_interface",
    extension="flash_attn_2_cuda",
    # "Paged KV cache block size must be divisible by 256" (csrc/flash_attn/flash_api.cpp).
    page_step=256,
    lowest_capability=(8, 0),
    capabilities=Capabilities(
        contents=("kv",),
        dtypes=("float16", "bfloat16"),
        cache_dtypes=(),  # "query and key must have the same dtype": no fp8 caches
        features=("bidirectional", "window", "scale", "softcap", "alibi", "lse"),
        # Other dimensions would be padded by a copy of the whole cache.
        head_dims=tuple(range(8, 257, 8)),
    ),
    keywords={
        "flash_attn_with_kvcache": (
            "q",
            "k_cache",
            "v_cache",
            "cache_seqlens",
            "block_table",
            "softmax_scale",
            "causal",
            "window_size",
            "softcap",
            "alibi_slopes",
            "return_softmax_lse",
        ),
        "flash_attn_varlen_func": (
            "q",
            "k",
            "v",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "softmax_scale",
            "causal",
            "window_size",
            "softcap",
            "alibi_slopes",
            "return_attn_probs",
            "block_table",
        ),
    },
)
VARIANTS: Mapping[str, Variant] = {"fa2": FA2}
# What is asked for by name and not built, with what only it can do.
PLANNED: Mapping[str, str] = {
    "fa3": "FlashAttention 3 (pages of any size, fp8 caches; Hopper)",
    "fa4": "FlashAttention 4 (sinks, pages of any size; Hopper and Blackwell)",
}
# Features that only another variant has, for the reason that a refusal gives.
ELSEWHERE: Mapping[str, str] = {
    "sinks": "none: FlashAttention 2 has no sinks (FlashAttention 4 has, not built here)",
    "cache_dtype": "the queries' own (fp8 caches are of FlashAttention 3, not built here)",
    "quant": "none (fp8 caches are of FlashAttention 3, not built here)",
}
