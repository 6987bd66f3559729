"""What the plain PyTorch backend declares. Imports no torch."""

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
    PageLayout,
    Refusal,
    hnd,
    nhd,
)
from kvcore_torch.options import TorchOptions

FLOATS = ("float32", "float16", "bfloat16", "float64")
QUANTIZED = ("int8", "fp8_e4m3", "fp8_e5m2")

CAPABILITIES = Capabilities(
    contents=("kv",),
    dtypes=FLOATS,
    # Any plain float: keys and values are converted when they are written and when they are read.
    cache_dtypes=(*FLOATS, *QUANTIZED),
    features=("bidirectional", "window", "chunk", "scale", "softcap", "alibi", "sinks", "lse", "unlike_dims", "quant"),
    granularities=("tensor", "head", "token_head"),
)


class TorchBackendSpec(BackendSpec):
    """Every softmax-attention feature of the contract in plain torch operations, on CPU and CUDA."""

    name = "torch"
    backend = "kvcore_torch.backend:TorchBackend"
    priority: ClassVar[Mapping[str, int]] = {"cpu": 100, "cuda": 10}
    Config = TorchOptions
    # The same shapes run through the same operations in the same order. Not batch-invariant: a matrix
    # product may round otherwise when a sequence's queries are cut into other pieces.
    conform_options: ClassVar[Sequence[Mapping[str, Any]]] = ({"kernel_block_size": 16, "layout": "kv_first"},)
    deterministic = True
    # Only visible keys and values take part in arithmetic; the rest of a gathered block is sliced off.
    reads_unwritten_slots = False
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: TorchOptions) -> str | None:
        """A reason only where torch itself is missing."""
        return None if find_spec("torch") else "torch is not installed; pip install torch"

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: TorchOptions) -> Refusal | None:
        """CPUs and CUDA devices of any capability."""
        return None if facts.kind in cls.priority else Refusal("device", facts.kind, sorted(cls.priority))

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: TorchOptions) -> Refusal | None:
        """The first fact outside the table, or a quantized cache without a granularity of scales."""
        refused = CAPABILITIES.check(query)
        quantized = query.cache_dtype in QUANTIZED
        if refused is None and quantized != (query.quant is not None):
            return Refusal("quant", query.quant, CAPABILITIES.granularities if quantized else "none")
        return refused

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: TorchOptions) -> Sequence[LayoutOption]:
        """``hnd`` and, where the fields allow it, ``kv_first``.

        Raises:
            BackendUnsupportedError: ``kv_first`` was asked for and this content cannot lie so.
        """
        content = spec.content
        if not isinstance(content, KVHeads):
            return ()
        problem = _kv_first_problem(content)
        if options.layout == "kv_first" and problem is not None:
            raise BackendUnsupportedError(
                f"layout kv_first needs keys and values of one shape and dtype: {problem}",
                field="backends.torch.layout",
                got="kv_first",
                allowed=("auto", "hnd"),
                remedy="set backends.torch.layout=hnd",
            )
        if content.dtype not in (*FLOATS, *QUANTIZED):
            return ()
        found: list[PageLayout] = []
        if options.layout != "kv_first":
            found.append(hnd(content))
        if options.layout != "hnd" and problem is None:
            found.append(nhd(content, name="kv_first", order="field_first"))
        size = options.kernel_block_size
        blocks = KernelBlocks(multiple_of=1) if size is None else KernelBlocks(sizes=(size,))
        return [LayoutOption(layout, blocks) for layout in found]


def _kv_first_problem(content: KVHeads) -> str | None:
    if content.head_dim != content.v_dim:
        return f"head_dim {content.head_dim} and head_dim_v {content.v_dim} differ"
    scales = [f.name for f in content.fields() if f.name not in ("k", "v")]
    return f"the page also holds {', '.join(scales)}" if scales else None
