"""What the FlashInfer backend declares. Imports neither torch nor flashinfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore.backend import (
    AttentionQuery,
    BackendSpec,
    Capabilities,
    ConfigError,
    DeviceFacts,
    KernelBlocks,
    KVCacheSpec,
    KVHeads,
    LayoutOption,
    Refusal,
    hnd,
    nhd,
)

if TYPE_CHECKING:
    from kvcore.backend import AttentionBackend

DISTRIBUTION = "flashinfer-python"
INSTALL = f"pip install {DISTRIBUTION}==0.6.13"
# 0.7.0 cannot be imported where torch has no CUDA; [lowest, below).
VERSIONS = ((0, 6, 13), (0, 8))
BROKEN = ((0, 7, 0),)
LOWEST_CAPABILITY = (7, 5)
PAGE_SIZES = (16, 32, 64)
HALVES = ("float16", "bfloat16")
FP8 = ("fp8_e4m3", "fp8_e5m2")
# Query heads a KV head for which the CUDA-core decode kernel is compiled (DISPATCH_GQA_GROUP_SIZE).
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
LAYOUTS = ("auto", "nhd", "hnd")
DECODES = ("auto", "cuda_cores", "tensor_cores")
LEAST_WORKSPACE = 1 << 20

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


@dataclass(frozen=True)
class FlashInferOptions:
    """Options of the FlashInfer backend.

    Attributes:
        layout: ``nhd``, ``hnd``, or ``auto``: nhd, else hnd.
        decode: Kernels for one query a sequence: ``cuda_cores``, ``tensor_cores``, or ``auto``: tensor cores
            for fp8 caches and from 4 query heads a KV head on, and where CUDA cores have no kernel.
        workspace_bytes: Scratch memory for split keys, shared by all layers; zeroed once.
        emulate: Run the library's Python over a stand-in for its kernels, on a CPU; proves calls only.
    """

    layout: str = "auto"
    decode: str = "auto"
    workspace_bytes: int = 128 << 20
    emulate: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("layout", LAYOUTS), ("decode", DECODES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"unknown {name} of the FlashInfer backend",
                    field=f"backends.flashinfer.{name}",
                    got=getattr(self, name),
                    allowed=allowed,
                )
        size = self.workspace_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < LEAST_WORKSPACE:
            raise ConfigError(
                "the workspace is too small",
                field="backends.flashinfer.workspace_bytes",
                got=size,
                allowed=f">= {LEAST_WORKSPACE}",
            )


class FlashInferBackendSpec(BackendSpec):
    """FlashInfer's paged decode and prefill wrappers: half precision, fp8 caches with a scale a tensor."""

    name = "flashinfer"
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

    @classmethod
    def create(cls, device: str, options: Any) -> AttentionBackend:
        """The backend itself; imports flashinfer and checks the keywords that are passed to it.

        Raises:
            BackendUnavailableError: The library is missing, or takes other keywords.
        """
        from kvcore_flashinfer.backend import make_backend

        return make_backend(device, options)


def use_tensor_cores(query: AttentionQuery, options: FlashInferOptions) -> bool:
    """Whether decode goes through the tensor-core kernels."""
    if options.decode != "auto":
        return options.decode == "tensor_cores"
    few = query.group_size in CUDA_CORE_GROUPS and query.group_size < 4
    return not few or query.cache_dtype in FP8
