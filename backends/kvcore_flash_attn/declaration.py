"""What the FlashAttention backend declares. Imports neither torch nor flash_attn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from kvcore.backend import (
    AttentionQuery,
    BackendSpec,
    DeviceFacts,
    KernelBlocks,
    KVCacheSpec,
    KVHeads,
    LayoutOption,
    Refusal,
    nhd,
)
from kvcore_flash_attn.options import FlashAttnOptions
from kvcore_flash_attn.variants import ELSEWHERE, VARIANTS, Variant

INSTALL = "pip install --no-build-isolation flash-attn==2.8.3.post2"
# With this variable set, flash_attn runs AMD kernels that take a block table and ignore it.
AMD_SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


class FlashAttnBackendSpec(BackendSpec):
    """FlashAttention over pages of 256 tokens: half precision, no sinks, no fp8, K and V of one dim."""

    name = "flash_attn"
    backend = "kvcore_flash_attn.backend:make_backend"
    priority: ClassVar[Mapping[str, int]] = {"cuda": 90}
    Config = FlashAttnOptions
    stand_ins: ClassVar[Mapping[str, str]] = {"emulate": "emulated"}
    # The forward pass is deterministic (the library's own promise). Not batch-invariant: how keys are split
    # follows from the batch.
    deterministic = True
    # Whole tiles of keys and values are multiplied and masked afterwards.
    reads_unwritten_slots = True
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: FlashAttnOptions) -> str | None:
        """The package, its version, its compiled extension (not in emulation), the switch to AMD kernels."""
        variant = VARIANTS[options.variant]
        reason = _wrong_package(variant)
        if reason is not None:
            return reason
        if os.environ.get(AMD_SWITCH, "FALSE") == "TRUE":
            return f"{AMD_SWITCH}=TRUE makes flash_attn ignore block tables; unset it"
        if not options.emulate and find_spec(variant.extension) is None:
            return (
                f"{variant.distribution} is installed without its CUDA kernels ({variant.extension}); "
                f"on a machine with CUDA and nvcc: {INSTALL}"
            )
        return None

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: FlashAttnOptions) -> Refusal | None:
        """CUDA from compute capability 8.0; a CPU only in emulation."""
        if facts.kind == "cuda":
            lowest = VARIANTS[options.variant].lowest_capability
            if facts.capability is None or facts.capability >= lowest:
                return None
            return Refusal("compute capability", facts.capability, f">= {lowest}")
        if facts.kind == "cpu" and options.emulate:
            return None
        return Refusal("device", facts.kind, "cuda, or cpu with backends.flash_attn.emulate=true")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: FlashAttnOptions) -> Refusal | None:
        """The first fact outside the variant's table; what only another variant has is named as such."""
        refused = VARIANTS[options.variant].capabilities.check(query)
        if refused is not None and refused.field in ELSEWHERE:
            return replace(refused, allowed=ELSEWHERE[refused.field])
        return refused

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: FlashAttnOptions) -> Sequence[LayoutOption]:
        """``nhd``, then ``kv_first``, in multiples of the variant's page step."""
        content = spec.content
        if not isinstance(content, KVHeads) or content.quant is not None or content.head_dim != content.v_dim:
            return ()
        blocks = KernelBlocks(multiple_of=VARIANTS[options.variant].page_step)
        found = (nhd(content), nhd(content, name="kv_first", order="field_first"))
        return [LayoutOption(layout, blocks) for layout in found]


def _wrong_package(variant: Variant) -> str | None:
    try:
        found = version(variant.distribution)
    except PackageNotFoundError:
        return f"{variant.distribution} is not installed; {INSTALL}"
    lowest, below = variant.versions
    parts = tuple(int(p) for p in found.split("+")[0].split(".")[:2] if p.isdigit())
    if not lowest <= parts < below or find_spec(variant.module.partition(".")[0]) is None:
        return f"{variant.distribution} {found} is installed, 2.8 or a later 2.x is needed; {INSTALL}"
    return None
