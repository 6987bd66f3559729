"""Poison: what lies in memory that the step may not read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.testing.oracle.layout_bytes import field_bytes, field_place

Memory = npt.NDArray[np.uint8]
# Little-endian byte patterns by dtype: NaN (where there is one), Inf, and a large finite number. int8 has
# neither NaN nor Inf: its most extreme code stands for both, and its scale fields carry the NaN.
_NAN = {
    "float64": b"\0\0\0\0\0\0\xf8\x7f",
    "float32": b"\0\0\xc0\x7f",
    "float16": b"\0\x7e",
    "bfloat16": b"\xc0\x7f",
    "fp8_e4m3": b"\x7f",
    "fp8_e5m2": b"\x7f",
    "int8": b"\x80",
}
_INF = {
    "float64": b"\0\0\0\0\0\0\xf0\x7f",
    "float32": b"\0\0\x80\x7f",
    "float16": b"\0\x7c",
    "bfloat16": b"\x80\x7f",
    "fp8_e4m3": b"\x7f",
    "fp8_e5m2": b"\x7c",
    "int8": b"\x80",
}
_EXTREME = {
    "float64": b"\0\0\0\0\0\0\xd9\x40",
    "float32": b"\0\0\xc8\x46",
    "float16": b"\x40\x76",
    "bfloat16": b"\xc8\x46",
    "fp8_e4m3": b"\x7e",
    "fp8_e5m2": b"\x78",
    "int8": b"\x7f",
}
PATTERNS = {"nan": _NAN, "inf": _INF, "extreme": _EXTREME}


def poison_everything(memory: Memory, config: KVCacheConfig, kind: str) -> None:
    """Every byte but the null blocks: padding is 0xFF, fields carry the pattern of their dtype.

    Where groups lie over one another, the last one's pattern stays; 0xFF is NaN in every float type.
    """
    memory.fill(0xFF)
    for group in config.kv_cache_groups:
        # Under `slots` all groups lie over one another, and ids alternate between their patterns.
        blocks = range(group.num_blocks)
        if config.placement == "slots":
            blocks = range(group.index, group.num_blocks, len(config.kv_cache_groups))
        _fill(memory, config, group, list(blocks), PATTERNS[kind])
    for group in config.kv_cache_groups:
        for null in range(max(1, group.blocks_per_large_page)):
            for cache in group.cache_ids:
                for start, end in config.footprint(cache, null):
                    memory[start:end] = 0


def soften(memory: Memory, config: KVCacheConfig, group: KVCacheGroupSpec, blocks: Sequence[int]) -> None:
    """Large finite numbers in a sequence's own blocks, for backends that declare `reads_unwritten_slots`."""
    _fill(memory, config, group, blocks, _EXTREME)


def _fill(
    memory: Memory, config: KVCacheConfig, group: KVCacheGroupSpec, blocks: Sequence[int], codes: dict[str, bytes]
) -> None:
    """Every field of some blocks with the pattern of its dtype; a field of a kernel block is one run."""
    for cache in group.cache_ids:
        for index, field in enumerate(group.layout.layout.fields):
            base, stride = field_place(config, group, cache, index)
            code = np.frombuffer(codes[field.dtype], dtype=np.uint8)
            run = np.tile(code, field_bytes(field, group.kernel_block_size) // len(code))
            for block in blocks:
                for kernel in range(block * group.ratio, (block + 1) * group.ratio):
                    start = base + kernel * stride
                    memory[start : start + len(run)] = run
