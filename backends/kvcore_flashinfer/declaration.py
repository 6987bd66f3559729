"""What the FlashInfer backend declares. Imports neither torch nor flashinfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from kvcore.backend import (
    AttentionQuery,
    BackendSpec,
    Capabilities,
    DeviceFacts,
    KernelBlocks,
    KVCacheSpec,
    KVHeads,
    LayoutOption,
    Refusal,
    hnd,
    nhd,
)
from kvcore_flashinfer.options import CUDA_CORE_GROUPS, FP8, PAGE_SIZES, FlashInferOptions

DISTRIBUTION = "flashinfer-python"
INSTALL = f"pip install {DISTRIBUTION}==0.6.13"
# 0.7.0 cannot be imported where torch has no CUDA; [lowest, below).
VERSIONS = ((0, 6, 13), (0, 8))
BROKEN = ((0, 7, 0),)
LOWEST_CAPABILITY = (7, 5)
HALVES = ("float16", "bfloat16")

CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=HALVES,
    cache_dtypes=(*HALVES, *FP8),
    features=("bidirectional", "window", "scale", "softcap", "lse", "quant"),
    head_dims=(64, 128, 256),
    granularities=("tensor",),
)
# What the library has elsewhere, for the reason that a refusal gives.
ELSEWHERE: Mapping[str, str] = {
    "sinks": "none: these wrappers accept sinks and their kernels ignore them",
    "alibi": "none: the library knows one set of slopes, computed from the number of heads",
    "content": "kv: latents have a wrapper of their own, not built here",
}


class FlashInferBackendSpec(BackendSpec):
    """FlashInfer's paged decode and prefill wrappers: half precision, fp8 caches with a scale a tensor."""

    name = "flashinfer"
    backend = "kvcore_flashinfer.backend:make_backend"
    priority: ClassVar[Mapping[str, int]] = {"cuda": 80}
    Config = FlashInferOptions
    stand_ins: ClassVar[Mapping[str, str]] = {"emulate": "emulated"}
    # Whole tiles of keys and values are multiplied and masked afterwards.
    reads_unwritten_slots = True
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: FlashInferOptions) -> str | None:
        """The package and its version."""
        try:
            found = version(DISTRIBUTION)
        except PackageNotFoundError:
            return f"{DISTRIBUTION} is not installed; {INSTALL}"
        parts = tuple(int(p) for p in found.split("+")[0].split(".")[:3] if p.isdigit())
        lowest, below = VERSIONS
        if not lowest <= parts < below or parts in BROKEN or find_spec("flashinfer") is None:
            return f"{DISTRIBUTION} {found} is installed, 0.6.13 or 0.7.1 to 0.7.x is needed; {INSTALL}"
        return None

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: FlashInferOptions) -> Refusal | None:
        """CUDA from compute capability 7.5; a CPU only in emulation."""
        if facts.kind == "cuda":
            if facts.capability is None or facts.capability >= LOWEST_CAPABILITY:
                return None
            return Refusal("compute capability", facts.capability, f">= {LOWEST_CAPABILITY}")
        if facts.kind == "cpu" and options.emulate:
            return None
        return Refusal("device", facts.kind, "cuda, or cpu with backends.flashinfer.emulate=true")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: FlashInferOptions) -> Refusal | None:
        """The first fact outside the table, or a pair of facts that the wrappers cannot combine."""
        refused = CAPABILITIES.check(query)
        if refused is not None:
            if refused.field in ELSEWHERE:
                return replace(refused, allowed=ELSEWHERE[refused.field])
            return refused
        if query.quant is None and query.cache_dtype != query.dtype:
            return Refusal("cache_dtype", query.cache_dtype, [query.dtype, *FP8])
        if query.quant is not None and query.cache_dtype not in FP8:
            return Refusal("quant", query.quant, f"none for {query.cache_dtype}")
        if query.mask.window is not None and not query.mask.causal:
            # There is a left bound only.
            return Refusal("window", f"{query.mask.window}, bidirectional", "causal windows")
        if options.decode == "cuda_cores" and query.group_size not in CUDA_CORE_GROUPS:
            return Refusal("group_size", query.group_size, f"{CUDA_CORE_GROUPS} with decode=cuda_cores")
        return None

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: FlashInferOptions) -> Sequence[LayoutOption]:
        """``nhd``, then ``hnd``, in pages of 16, 32 or 64 tokens; K and V have equal strides in both."""
        content = spec.content
        if not isinstance(content, KVHeads) or content.head_dim != content.v_dim or len(content.fields()) > 2:
            return ()
        found = [layout for layout in (nhd(content), hnd(content)) if options.layout in ("auto", layout.name)]
        return [LayoutOption(layout, KernelBlocks(sizes=PAGE_SIZES)) for layout in found]
