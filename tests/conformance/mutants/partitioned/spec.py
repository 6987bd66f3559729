"""What the partitioned backend declares. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.attention.query import AttentionQuery, Capabilities
from kvcore.errors import Refusal
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.dtypes import dtype
from kvcore.spec.layout import TOKEN, Axis, KernelBlocks, LayoutField, LayoutOption, PageLayout

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("fp8_e4m3", "fp8_e5m2")
CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=FLOATS,
    cache_dtypes=(*FLOATS, *FP8),
    features=("bidirectional", "window", "chunk", "scale", "softcap", "alibi", "sinks", "lse", "quant"),
    granularities=("tensor", "head"),
)
# Bytes that a thread loads at once.
VECTOR = 16


@dataclass(frozen=True)
class PartitionedOptions:
    """Options of the partitioned backend.

    Attributes:
        partition: Keys that one program works through.
    """

    partition: int = 256


class PartitionedSpec(BackendSpec):
    """Keys in partitions that are reduced afterwards, sequences in padded batches, keys packed by vectors."""

    name = "partitioned"
    priority: ClassVar[Mapping[str, int]] = {"cpu": 1}
    Config = PartitionedOptions
    conform_options: ClassVar[Sequence[Mapping[str, Any]]] = ({"partition": 512}, {"partition": 64})
    deterministic = True
    reads_unwritten_slots = True
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        """Needs torch alone."""
        return None

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: Any) -> Refusal | None:
        """CPUs alone."""
        return None if facts.kind == "cpu" else Refusal("device", facts.kind, ["cpu"])

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: Any) -> Refusal | None:
        """The first fact outside the table, or a plain cache of another dtype."""
        refused = CAPABILITIES.check(query)
        if refused is None and (query.cache_dtype in FP8) != (query.quant is not None):
            refused = Refusal("quant", query.quant, ["tensor", "head"] if query.quant is None else "none")
        if refused is None and query.quant is None and query.cache_dtype != query.dtype:
            refused = Refusal("cache_dtype", query.cache_dtype, [query.dtype, *FP8])
        return refused

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: Any) -> Sequence[LayoutOption]:
        """Keys (head, dim / x, token, x), values (head, dim, token)."""
        content = spec.content
        if not isinstance(content, KVHeads) or len(content.fields()) > 2 or content.dtype not in (*FLOATS, *FP8):
            return ()
        heads, x = content.num_kv_heads, gcd(content.head_dim, VECTOR * 8 // dtype(content.dtype).bits)
        k = (Axis("head", heads), Axis("dim", content.head_dim // x), Axis(TOKEN, None), Axis("dim", x))
        v = (Axis("head", heads), Axis("dim", content.v_dim), Axis(TOKEN, None))
        packed = PageLayout("packed", (LayoutField("k", k, content.dtype), LayoutField("v", v, content.dtype)))
        return [LayoutOption(packed, KernelBlocks(multiple_of=1))]

    @classmethod
    def create(cls, device: str, options: Any) -> Any:
        """The backend on a torch device."""
        from .backend import PartitionedBackend

        return PartitionedBackend(device, options)
