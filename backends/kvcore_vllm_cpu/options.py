"""Options of the vllm_cpu backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.backend import ConfigError

AUTO = "auto"
# Tokens that one pass over the keys takes; blocks hold a multiple (BlockSizeAlignment in csrc/cpu/cpu_attn_*.hpp).
TOKENS = {"vec": 32, "vec16": 16}


@dataclass(frozen=True)
class VllmCpuOptions:
    """Options of the vllm_cpu backend.

    Attributes:
        isa: The kernel's variant: ``vec`` (blocks of 32 tokens), ``vec16`` (blocks of 16), or ``auto``: vec where
            it has the head dimension, as vLLM chooses.
    """

    isa: str = field(default=AUTO, metadata={"choices": (AUTO, *TOKENS)})

    def __post_init__(self) -> None:
        if self.isa not in (AUTO, *TOKENS):
            raise ConfigError(
                "unknown variant of vLLM's CPU kernel",
                field="backends.vllm_cpu.isa",
                got=self.isa,
                allowed=[AUTO, *TOKENS],
            )

    def isa_for(self, head_dim: int) -> str:
        """The variant that serves heads of `head_dim` elements."""
        if self.isa != AUTO:
            return self.isa
        return "vec" if head_dim % 32 == 0 else "vec16"
