"""Options of the FlashAttention backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.backend import ConfigError, NotBuiltError
from kvcore_flash_attn.variants import PLANNED, VARIANTS


@dataclass(frozen=True)
class FlashAttnOptions:
    """Options of the FlashAttention backend.

    Attributes:
        variant: Generation of the library; ``fa2`` is the one that is built.
        emulate: Run the library's Python over a stand-in for its kernels, on a CPU; proves calls only.
    """

    variant: str = "fa2"
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.variant in PLANNED:
            raise NotBuiltError(
                f"{PLANNED[self.variant]} is another package and not built yet",
                field="backends.flash_attn.variant",
                got=self.variant,
                allowed=list(VARIANTS),
                remedy="use backends.flash_attn.variant=fa2",
            )
        if self.variant not in VARIANTS:
            raise ConfigError(
                "unknown variant of FlashAttention",
                field="backends.flash_attn.variant",
                got=self.variant,
                allowed=list(VARIANTS),
            )
