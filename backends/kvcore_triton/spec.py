"""What the Triton backend declares. Its kernels are not built in this version."""

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

# What `triton.compile` builds ahead of time for: CUDA from Ampere on, and these AMD targets.
LOWEST_CAPABILITY = (8, 0)
ROCM_ARCHS = ("gfx942", "gfx950", "gfx1100")
QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8")
FLOATS = ("float16", "bfloat16", "float32")

CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=FLOATS,
    cache_dtypes=(*FLOATS, *QUANTIZED),
    features=(
        "bidirectional",
        "window",
        "chunk",
        "scale",
        "softcap",
        "alibi",
        "sinks",
        "lse",
        "quant",
        "unlike_dims",
    ),
    granularities=("tensor", "head", "token_head"),
)


@dataclass(frozen=True)
class TritonOptions:
    """Options of the Triton backend.

    Attributes:
        interpret: Run the kernels in Triton's interpreter, on a CPU; slow, for finding faults.
    """

    interpret: bool = False


class TritonBackendSpec(BackendSpec):
    """Triton kernels for every feature of the contract, quantized caches included."""

    name = "triton"
    priority: ClassVar[Mapping[str, int]] = {"cuda": 70, "rocm": 70}
    Config = TritonOptions
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: TritonOptions) -> str | None:
        """The kernels are not built in this version."""
        asked = "backends.triton.interpret=true cannot be served: " if options.interpret else ""
        return (
            f"{asked}the kernels of backend triton are not built in this version of kvcore; "
            "choose another backend, such as backend=torch"
        )

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: TritonOptions) -> Unsupported | None:
        """CUDA from compute capability 8.0, three AMD targets; a CPU only through the interpreter."""
        if facts.kind == "cuda":
            if facts.capability is None or facts.capability >= LOWEST_CAPABILITY:
                return None
            return Unsupported("compute capability", facts.capability, f">= {LOWEST_CAPABILITY}")
        if facts.kind == "rocm":
            known = facts.arch.split(":")[0] in ROCM_ARCHS
            return None if known else Unsupported("arch", facts.arch or "unknown", ROCM_ARCHS)
        if facts.kind == "cpu" and options.interpret:
            return None
        return Unsupported("device", facts.kind, "cuda, rocm, or cpu with backends.triton.interpret=true")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: TritonOptions) -> Unsupported | None:
        """The first fact outside the table; a plain cache has the dtype of the queries."""
        refusal = CAPABILITIES.check(query)
        if refusal is None and query.quant is None and query.cache_dtype != query.dtype:
            return Unsupported("cache_dtype", query.cache_dtype, [query.dtype, *QUANTIZED])
        return refusal

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: TritonOptions) -> Sequence[LayoutOption]:
        """``nhd``, ``hnd``, and ``kv_first`` where keys and values are alike, in multiples of 16 tokens."""
        content = spec.content
        if not isinstance(content, KVHeads):
            return ()
        found = [nhd(content), hnd(content)]
        if content.head_dim == content.v_dim and len(content.fields()) == 2:
            found.append(nhd(content, name="kv_first", order="field_first"))
        return [LayoutOption(layout, KernelBlocks(multiple_of=16)) for layout in found]

    @classmethod
    def create(cls, device: str, options: Any) -> AttentionBackend:
        """Refused until the kernels are built."""
        raise BackendUnavailableError(
            "backend triton is declared but its kernels are not built yet",
            field="backend", got="triton", remedy="choose another backend, such as backend=torch",
        )  # fmt: skip
