"""What the FlashInfer backend declares. Its kernels are not built in this version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore.attention.query import AttentionQuery, Capabilities, Unsupported
from kvcore.attention.spec import BackendSpec, DeviceFacts
from kvcore.errors import BackendUnavailableError
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd, nhd

if TYPE_CHECKING:
    from kvcore.attention.backend import AttentionBackend

LOWEST_CAPABILITY = (7, 5)
PAGE_SIZES = (16, 32, 64)
HALVES = ("float16", "bfloat16")
FP8 = ("fp8_e4m3", "fp8_e5m2")

CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=HALVES,
    cache_dtypes=(*HALVES, *FP8),
    # Sinks are left out: `run(sinks=...)` accepts them and its kernels ignore them.
    features=("bidirectional", "window", "scale", "softcap", "lse", "quant"),
    head_dims=(64, 128, 256),
    granularities=("tensor",),
)


@dataclass(frozen=True)
class FlashInferOptions:
    """Options of the FlashInfer backend.

    Attributes:
        emulate: Run the library's Python over a stand-in for its kernels, on a CPU; proves calls only.
    """

    emulate: bool = False


class FlashInferBackendSpec(BackendSpec):
    """FlashInfer's paged wrappers through the tensor-core path, which takes any group size."""

    name = "flashinfer"
    priority: ClassVar[Mapping[str, int]] = {"cuda": 80}
    Config = FlashInferOptions
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: FlashInferOptions) -> str | None:
        """The adapter is not built in this version."""
        asked = "backends.flashinfer.emulate=true cannot be served: " if options.emulate else ""
        return (
            f"{asked}the kernels of backend flashinfer are not built in this version of kvcore; "
            "choose another backend, such as backend=torch"
        )

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: FlashInferOptions) -> Unsupported | None:
        """CUDA from compute capability 7.5; a CPU only in emulation."""
        if facts.kind == "cuda":
            if facts.capability is None or facts.capability >= LOWEST_CAPABILITY:
                return None
            return Unsupported("compute capability", facts.capability, f">= {LOWEST_CAPABILITY}")
        if facts.kind == "cpu" and options.emulate:
            return None
        return Unsupported("device", facts.kind, "cuda, or cpu with backends.flashinfer.emulate=true")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: FlashInferOptions) -> Unsupported | None:
        """The first fact outside the table, or a pair of facts that the wrappers cannot combine."""
        refusal = CAPABILITIES.check(query)
        if refusal is not None:
            return refusal
        if query.quant is None and query.cache_dtype != query.dtype:
            return Unsupported("cache_dtype", query.cache_dtype, [query.dtype, *FP8])
        if query.mask.window is not None and not query.mask.causal:
            # There is a left bound only.
            return Unsupported("window", f"{query.mask.window}, bidirectional", "causal windows")
        return None

    @classmethod
    def layouts(
        cls, spec: KVCacheSpec, facts: DeviceFacts, options: FlashInferOptions
    ) -> Sequence[LayoutOption]:
        """``nhd``, then ``hnd``, in pages of 16, 32 or 64 tokens; K and V must have equal strides."""
        content = spec.content
        if not isinstance(content, KVHeads) or content.head_dim != content.v_dim or len(content.fields()) > 2:
            return ()
        return [
            LayoutOption(layout, KernelBlocks(sizes=PAGE_SIZES)) for layout in (nhd(content), hnd(content))
        ]

    @classmethod
    def create(cls, device: str, options: Any) -> AttentionBackend:
        """Refused until the adapter is built."""
        raise BackendUnavailableError(
            "backend flashinfer is declared but its kernels are not built yet",
            field="backend", got="flashinfer", remedy="choose another backend, such as backend=torch",
        )  # fmt: skip
