"""Options of the torch backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.backend import ConfigError

LAYOUTS = ("auto", "kv_first", "hnd")


@dataclass(frozen=True)
class TorchOptions:
    """Options of the torch backend.

    Attributes:
        layout: ``hnd`` (head, token, dim), ``kv_first`` [2, N, P, K, D], or ``auto``: hnd, else kv_first.
        kernel_block_size: Tokens of a kernel block; None works in the manager's blocks as they are.
    """

    layout: str = field(default="auto", metadata={"choices": LAYOUTS})
    kernel_block_size: int | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(
                "unknown layout of the torch backend", field="backends.torch.layout", got=self.layout, allowed=LAYOUTS
            )
        size = self.kernel_block_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                "a kernel block has at least one token",
                field="backends.torch.kernel_block_size",
                got=size,
                allowed=">= 1, or null",
            )
