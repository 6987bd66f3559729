"""What the FlashAttention-2 backend declares. Its kernels are not built in this version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore.attention.query import AttentionQuery, Capabilities, Unsupported
from kvcore.attention.spec import BackendSpec, DeviceFacts
from kvcore.errors import BackendUnavailableError
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import KernelBlocks, LayoutOption, nhd

if TYPE_CHECKING:
    from kvcore.attention.backend import AttentionBackend

LOWEST_CAPABILITY = (8, 0)
# Pages must hold a multiple of 256 tokens (checked in the library's C++).
PAGE_STEP = 256
HEAD_DIMS = tuple(range(8, 257, 8))

CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=("float16", "bfloat16"),
    cache_dtypes=(),  # the queries' own dtype: no fp8 caches
    features=("bidirectional", "window", "scale", "softcap", "alibi", "lse"),
    head_dims=HEAD_DIMS,
)


@dataclass(frozen=True)
class FlashAttnOptions:
    """Options of the FlashAttention backend.

    Attributes:
        emulate: Run the library's Python over a stand-in for its kernels, on a CPU; proves calls only.
    """

    emulate: bool = False


class FlashAttnBackendSpec(BackendSpec):
    """FlashAttention-2 over pages of 256 tokens: half precision, no sinks, no fp8, K and V of one dim."""

    name = "flash_attn"
    priority: ClassVar[Mapping[str, int]] = {"cuda": 90}
    Config = FlashAttnOptions
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: FlashAttnOptions) -> str | None:
        """The adapter is not built in this version."""
        asked = "backends.flash_attn.emulate=true cannot be served: " if options.emulate else ""
        return (
            f"{asked}the kernels of backend flash_attn are not built in this version of kvcore; "
            "choose another backend, such as backend=torch"
        )

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: FlashAttnOptions) -> Unsupported | None:
        """CUDA from compute capability 8.0; a CPU only in emulation."""
        if facts.kind == "cuda":
            if facts.capability is None or facts.capability >= LOWEST_CAPABILITY:
                return None
            return Unsupported("compute capability", facts.capability, f">= {LOWEST_CAPABILITY}")
        if facts.kind == "cpu" and options.emulate:
            return None
        return Unsupported("device", facts.kind, "cuda, or cpu with backends.flash_attn.emulate=true")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: FlashAttnOptions) -> Unsupported | None:
        """The first fact outside the table."""
        return CAPABILITIES.check(query)

    @classmethod
    def layouts(
        cls, spec: KVCacheSpec, facts: DeviceFacts, options: FlashAttnOptions
    ) -> Sequence[LayoutOption]:
        """``nhd``, then ``kv_first``, in multiples of 256 tokens."""
        content = spec.content
        if not isinstance(content, KVHeads) or content.quant is not None or content.head_dim != content.v_dim:
            return ()
        found = (nhd(content), nhd(content, name="kv_first", order="field_first"))
        return [LayoutOption(layout, KernelBlocks(multiple_of=PAGE_STEP)) for layout in found]

    @classmethod
    def create(cls, device: str, options: Any) -> AttentionBackend:
        """Refused until the adapter is built."""
        raise BackendUnavailableError(
            "backend flash_attn is declared but its kernels are not built yet",
            field="backend", got="flash_attn", remedy="choose another backend, such as backend=torch",
        )  # fmt: skip
