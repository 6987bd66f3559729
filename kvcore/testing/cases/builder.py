"""`CaseBuilder`: cases around a base, and steps at every block size that a declaration claims. Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from kvcore.testing.cases.axes import LATENT, sequences
from kvcore.testing.cases.case import Base, Case, Seq


class CaseBuilder:
    """Makes cases whose block size, head dimension and dtype are the base's unless they are what varies."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def case(self, level: str, check: str, what: str, phase: str, **changes: Any) -> Case:
        """One case; `kernel_ratio` r makes the manager's block r times the base's kernel block."""
        ratio = changes.get("kernel_ratio", 1)
        block = changes.pop("block_size", self.base.block_size * ratio)
        if "seqs" not in changes:
            changes["seqs"] = sequences(phase, block)
        name = f"{level}.{check}.{what}" + (f".{phase}" if phase != "none" else "")
        settings = {"dtype": self.base.dtype, "head_dim": self.base.head_dim, "block_size": block} | changes
        # Data differ from case to case, and never from run to run.
        return Case(name, level, check, phase=phase, seed=zlib.crc32(name.encode()) % 10_000, **settings)

    def latent(self, level: str, check: str, phase: str, **changes: Any) -> Case:
        """A case over latents, with queries that are absorbed already."""
        mine = {"dtype": self.base.latent_dtype, "block_size": self.base.latent_block_size}
        return self.case(level, check, "content=latent", phase, **LATENT, **mine, **changes)

    def attend(self, what: str, phase: str, **changes: Any) -> Case:
        """A case of level 2."""
        return self.case("L2", "attend", what, phase, **changes)


# Larger ones wait for level full.
QUICK_UP_TO = 64


def claimed_blocks(m: CaseBuilder, level: str, check: str, *phases: str) -> Iterator[Case]:
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
