"""`Maker`: builds cases around a base. Imports no torch."""

from __future__ import annotations

import zlib
from typing import Any

from kvcore.testing.cases.axes import LATENT, sequences
from kvcore.testing.cases.case import Base, Case


class Maker:
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
