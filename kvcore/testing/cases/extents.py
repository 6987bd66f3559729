"""How large a case is, axis by axis, in ranges that kernels tell apart. Imports no torch.

The bounds are where kernels of the field change their path: partitions of 256 or 512 keys, tables of 64 or 128 columns,
buckets of queries and sequences that are powers of two. What is right within a range is often wrong past it.
"""

from __future__ import annotations

from collections.abc import Mapping

# Per axis, the last number of each range but the open one.
BOUNDS: Mapping[str, tuple[int, ...]] = {
    "context": (256, 512, 1024, 4096, 32768),
    "rows": (1, 64, 256),
    "tokens": (128, 1024),
    "sequences": (8, 32, 128, 256),
    "blocks": (64, 128),
    "heads": (16, 39, 63, 127),
    "kv_heads": (3, 7, 31, 63),
}


def extent(axis: str, size: int) -> str:
    """The range of a size in words, such as ``257-512`` or ``4097+``."""
    first = 1
    for last in BOUNDS[axis]:
        if size <= last:
            return str(last) if first == last else f"{first}-{last}"
        first = last + 1
    return f"{first}+"


def extents(axis: str) -> list[str]:
    """All ranges of an axis, smallest first."""
    return [extent(axis, size) for size in (*BOUNDS[axis], BOUNDS[axis][-1] + 1)]
