"""Every kernel block size that a declaration claims, in one small step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.testing.cases.case import Case, Seq
from kvcore.testing.cases.make import Maker

# Larger ones wait for level full.
QUICK_UP_TO = 64


def claimed_blocks(m: Maker, level: str, check: str, *phases: str) -> Iterator[Case]:
    """Steps whose tokens lie on both sides of the end of a block.

    Args:
        m: Makes the cases; its base knows the sizes.
        level: Of the cases.
        check: Of the cases.
        phases: ``decode`` or ``mixed``; kernels for the two may be compiled one by one.
    """
    for layout, sizes in enumerate(m.base.kernel_blocks):
        for size in sizes:
            if layout == 0 and size == m.base.block_size:
                continue  # what every other case is asked in
            what = f"kernel_block={size}" + (f".layout={layout}" if layout else "")
            for phase in phases:
                second = Seq(size - 1, 3) if phase == "mixed" else Seq(3, 1)
                yield m.case(
                    level,
                    check,
                    what,
                    phase,
                    block_size=size,
                    layout=layout,
                    seqs=(Seq(size, 1), second),
                    tier="quick" if size <= QUICK_UP_TO else "full",
                )
