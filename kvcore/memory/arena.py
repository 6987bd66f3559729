"""`Arena`: the raw bytes of a cache, allocated once."""

from __future__ import annotations

import numpy as np
import torch

from kvcore.errors import CapacityError, ConfigError
from kvcore.plan.config import ARENA_ALIGNMENT
from kvcore.spec.dtypes import round_up


class Arena:
    """int8 bytes at an address that is a multiple of 256 and never changes.

    The bytes start as zeros, so the null block needs no step of its own. On a CPU they come from
    `calloc`: pages that no block has touched yet take no memory.

    Args:
        nbytes: Bytes of the cache.
        device: A torch device.
        pinned: Page-locked host memory, for copies that overlap with kernels (host arenas for swap).
        memory: Memory that somebody else allocated on `device`, of any dtype and shape, with `usable_bytes` of at
            least `nbytes`. The arena zeroes what it uses, and holds on to it.

    Attributes:
        raw: int8 [nbytes], the bytes that belong to the cache.
        nbytes: Their number.
        device: Where they lie.
    """

    def __init__(
        self,
        nbytes: int,
        device: str | torch.device = "cpu",
        *,
        pinned: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise ConfigError("an arena needs a positive number of bytes", field="nbytes", got=nbytes, allowed=">= 1")
        self.nbytes = nbytes
        self.device = torch.device(device)
        whole = self._allocated(pinned) if memory is None else _lent(memory, nbytes, self.device)
        self.device = whole.device
        skip = -whole.data_ptr() % ARENA_ALIGNMENT
        self._units = whole[skip : skip + round_up(nbytes, ARENA_ALIGNMENT)]
        self.raw = self._units[:nbytes]

    def _allocated(self, pinned: bool) -> torch.Tensor:
        # Whole units of 256 bytes, so that the bytes can be reinterpreted as any dtype, and one unit more
        # to move the base to a multiple of 256.
        wanted = round_up(self.nbytes, ARENA_ALIGNMENT) + ARENA_ALIGNMENT
        try:
            if self.device.type == "cpu" and not pinned:
                return torch.from_numpy(np.zeros(wanted, dtype=np.int8))
            return torch.zeros(wanted, dtype=torch.int8, device=self.device, pin_memory=pinned)
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise CapacityError(
                f"the device {self.device} has no room for a cache of this size",
                field="cache.memory",
                got=f"{self.nbytes} bytes",
                remedy="lower cache.memory or cache.num_blocks",
            ) from error

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.raw.data_ptr()

    def as_dtype(self, element: torch.dtype) -> torch.Tensor:
        """The bytes, and up to 255 unused ones after them, as a flat tensor of another dtype (no copy)."""
        return self._units.view(element)


def usable_bytes(memory: torch.Tensor) -> int:
    """Bytes of an arena that can lie in this memory: whole units of 256 bytes, from the first aligned address."""
    room = memory.numel() * memory.element_size() - (-memory.data_ptr() % ARENA_ALIGNMENT)
    return max(0, room // ARENA_ALIGNMENT * ARENA_ALIGNMENT)


def _lent(memory: torch.Tensor, nbytes: int, device: torch.device) -> torch.Tensor:
    """Somebody else's bytes as int8, zeroed.

    Raises:
        ConfigError: They are not one run, lie elsewhere, or are too few.
    """
    remedy = "give one contiguous tensor on the device of the cache"
    if not memory.is_contiguous() or memory.device.type != device.type:
        got = f"{list(memory.shape)} with strides {list(memory.stride())} on {memory.device}"
        raise ConfigError(
            "a cache cannot lie in this memory",
            field="memory",
            got=got,
            allowed=f"one run of bytes on {device}",
            remedy=remedy,
        )
    if usable_bytes(memory) < nbytes:
        raise ConfigError(
            "the memory is too small for this cache",
            field="memory",
            got=f"{usable_bytes(memory)} bytes in whole units of {ARENA_ALIGNMENT}",
            allowed=f">= {nbytes}",
            remedy=f"{remedy}, or plan a smaller cache",
        )
    whole = memory.detach().view(-1).view(torch.int8)
    whole[: nbytes + ARENA_ALIGNMENT].zero_()
    return whole
