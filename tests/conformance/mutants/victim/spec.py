"""What the dense reference backend declares. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.attention.query import AttentionQuery, Capabilities
from kvcore.errors import Refusal
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd, nhd

FLOATS = ("float32", "float16", "bfloat16", "float64")
# The granularity of scales that goes with each quantized dtype.
GRANULARITY = {"int8": "token_head", "fp8_e4m3": "tensor"}
CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=FLOATS,
    cache_dtypes=(*FLOATS, *GRANULARITY),
    features=("bidirectional", "window", "chunk", "scale", "softcap", "alibi", "sinks", "lse", "unlike_dims", "quant"),
    granularities=tuple(GRANULARITY.values()),
)


@dataclass(frozen=True)
class ReferenceOptions:
    """Options of the reference backend."""

    verbose: bool = False


class ReferenceSpec(BackendSpec):
    """Every feature of the contract, sequence by sequence, over dense keys."""

    name = "reference"
    api_version = 1
    priority: ClassVar[Mapping[str, int]] = {"cpu": 1}
    Config = ReferenceOptions
    batch_invariant = True
    deterministic = True
    graph_capture = False
    reads_unwritten_slots = False
    max_offset_bits = 63
    stand_ins: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        """Needs torch alone."""
        return None  # needs torch alone

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: Any) -> Refusal | None:
        """CPUs and CUDA devices."""
        if facts.kind in ("cpu", "cuda"):
            return None
        return Refusal("device", facts.kind, ["cpu", "cuda"])

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: Any) -> Refusal | None:
        """The first fact outside the table, or a granularity that its dtype does not go with."""
        refused = CAPABILITIES.check(query)
        wanted = GRANULARITY.get(query.cache_dtype)
        if refused is None and query.quant != wanted:
            refused = Refusal("quant", query.quant, [wanted])
        return refused

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: Any) -> Sequence[LayoutOption]:
        """(token, head, dim), then (head, token, dim)."""
        content = spec.content
        if not isinstance(content, KVHeads):
            return ()
        granularity = content.quant.granularity if content.quant else None
        if granularity != GRANULARITY.get(content.dtype):
            return ()
        first = nhd(content)
        second = hnd(content)
        blocks = KernelBlocks(multiple_of=1)
        return [LayoutOption(layout, blocks) for layout in (first, second)]

    @classmethod
    def create(cls, device: str, options: Any) -> Any:
        """The backend on a torch device."""
        from .backend import ReferenceBackend

        return ReferenceBackend(device)
