"""What the Triton backend declares. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from kvcore.backend import (
    AttentionQuery,
    BackendSpec,
    BackendUnsupportedError,
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
from kvcore_triton.options import TritonOptions
from kvcore_triton.targets import target_of

LOWEST_CAPABILITY = (8, 0)
ROCM_ARCHS = ("gfx942", "gfx950", "gfx1100")
QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8")
FLOATS = ("float16", "bfloat16", "float32")
GRANULARITIES = ("tensor", "head", "token_head")
MAX_HEAD_DIM = 512

CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=FLOATS,
    cache_dtypes=(*FLOATS, *QUANTIZED),
    features=("bidirectional", "window", "chunk", "scale", "softcap", "alibi", "sinks", "lse", "quant", "unlike_dims"),
    granularities=GRANULARITIES,
)


class TritonBackendSpec(BackendSpec):
    """Triton kernels for every feature of the contract, quantized caches included."""

    name = "triton"
    backend = "kvcore_triton.backend:TritonBackend"
    priority: ClassVar[Mapping[str, int]] = {"cuda": 70, "rocm": 70}
    Config = TritonOptions
    deterministic = True
    reads_unwritten_slots = False
    max_offset_bits = 63
    # Keys that several programs share, and tiles of another shape.
    conform_options: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"num_splits": 4},
        {"num_splits": 3, "block_n": 32},
        {"block_m": 32, "block_n": 16},
    )
    stand_ins: ClassVar[Mapping[str, str]] = {"interpret": "interpreter"}

    @classmethod
    def unavailable(cls, options: TritonOptions) -> str | None:
        """Only where Triton itself is missing."""
        if find_spec("triton") is None:
            return "Triton is not installed; pip install 'kvcore[triton]'"
        return None

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: TritonOptions) -> Refusal | None:
        """CUDA from compute capability 8.0, three AMD targets; a CPU only through the interpreter."""
        if options.interpret and facts.kind != "cpu":
            # Not ignored: a run that says that it was interpreted must have been.
            return Refusal("backends.triton.interpret", f"true on {facts.kind}", "on a CPU: device=cpu")
        if facts.kind == "cuda":
            if facts.capability is None or facts.capability >= LOWEST_CAPABILITY:
                return None
            return Refusal("compute capability", facts.capability, f">= {LOWEST_CAPABILITY}")
        if facts.kind == "rocm":
            known = facts.arch.split(":")[0] in ROCM_ARCHS
            return None if known else Refusal("arch", facts.arch or "unknown", ROCM_ARCHS)
        if facts.kind == "cpu" and options.interpret:
            return None
        return Refusal("device", facts.kind, "cuda, rocm, or cpu with backends.triton.interpret=true")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: TritonOptions) -> Refusal | None:
        """The first fact outside the table; a plain cache has the dtype of the queries."""
        refusal = CAPABILITIES.check(query)
        if refusal is not None:
            return refusal
        for name in ("head_dim", "head_dim_v"):
            if getattr(query, name) > MAX_HEAD_DIM:
                return Refusal(name, getattr(query, name), f"<= {MAX_HEAD_DIM}")
        quantized = query.cache_dtype in QUANTIZED
        if quantized != (query.quant is not None):
            return Refusal("quant", query.quant, GRANULARITIES if quantized else "none")
        if not quantized and query.cache_dtype != query.dtype:
            return Refusal("cache_dtype", query.cache_dtype, [query.dtype, *QUANTIZED])
        return None

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: TritonOptions) -> Sequence[LayoutOption]:
        """``nhd``, ``hnd``, and ``kv_first`` where keys and values are alike, in multiples of 16 tokens.

        Raises:
            BackendUnsupportedError: The device has no such fp8 type.
        """
        content = spec.content
        if not isinstance(content, KVHeads) or content.dtype not in (*FLOATS, *QUANTIZED):
            return ()
        target = target_of(facts, interpret=options.interpret and facts.kind == "cpu")
        if content.dtype.startswith("fp8") and target is not None and content.dtype not in target.fp8:
            raise BackendUnsupportedError(
                f"{target.name} has no {content.dtype}",
                field="cache_dtype",
                got=content.dtype,
                allowed=[*target.fp8, "int8"],
                remedy="choose another cache.dtype",
            )
        found = [nhd(content), hnd(content)]
        if content.head_dim == content.v_dim and len(content.fields()) == 2:
            found.append(nhd(content, name="kv_first", order="field_first"))
        return [LayoutOption(layout, KernelBlocks(multiple_of=16)) for layout in found]
