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

    Attributes:
        raw: int8 [nbytes], the bytes that belong to the cache.
        nbytes: Their number.
        device: Where they lie.
    """

    def __init__(self, nbytes: int, device: str | torch.device = "cpu", *, pinned: bool = False) -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise ConfigError("an arena needs a positive number of bytes", field="nbytes", got=nbytes, allowed=">= 1")
        self.nbytes = nbytes
        self.device = torch.device(device)
        # Whole units of 256 bytes, so that the bytes can be reinterpreted as any dtype, and one unit more
        # to move the base to a multiple of 256.
        self._capacity = round_up(nbytes, ARENA_ALIGNMENT)
        wanted = self._capacity + ARENA_ALIGNMENT
        try:
            if self.device.type == "cpu" and not pinned:
                whole = torch.from_numpy(np.zeros(wanted, dtype=np.int8))
            else:
                whole = torch.zeros(wanted, dtype=torch.int8, device=self.device, pin_memory=pinned)
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise CapacityError(
                f"the device {self.device} has no room for a cache of this size",
                field="cache.memory",
                got=f"{nbytes} bytes",
                remedy="lower cache.memory or cache.num_blocks",
            ) from error
        self.device = whole.device
        skip = -whole.data_ptr() % ARENA_ALIGNMENT
        self._units = whole[skip : skip + self._capacity]
        self.raw = self._units[:nbytes]

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.raw.data_ptr()

    def as_dtype(self, element: torch.dtype) -> torch.Tensor:
        """The bytes, and up to 255 unused ones after them, as a flat tensor of another dtype (no copy)."""
        return self._units.view(element)
