"""Integers for a device: `StagingBuffer` at addresses that never change, `uploaded` for reading once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


class StagingBuffer:
    """One flat buffer on the host (pinned beside an accelerator) and its copy on the device.

    On a CPU both are the same bytes. Elsewhere `upload` sends a leading part in one asynchronous copy, and
    `begin` waits until the copy before has left the host, so that nothing is overwritten in flight.

    Args:
        size: Elements.
        element: torch.int32 or torch.int64.
        device: Where kernels read.

    Attributes:
        host: The host's numbers as a numpy array.
        device: The device's numbers.
    """

    def __init__(self, size: int, element: torch.dtype, device: str | torch.device) -> None:
        place = torch.device(device)
        pinned = place.type == "cuda"
        self._source = torch.zeros(max(1, size), dtype=element, pin_memory=pinned)
        self.host: npt.NDArray[Any] = self._source.numpy()
        self.device = self._source if place.type == "cpu" else torch.zeros_like(self._source, device=place)
        self._sent: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Call before the host writes the numbers of a new step."""
        if self._sent is not None:
            self._sent.synchronize()

    def upload(self, size: int) -> None:
        """Make the first `size` elements visible on the device."""
        if self.device is self._source:
            return
        self.device[:size].copy_(self._source[:size], non_blocking=True)
        if self.device.is_cuda:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(self.device.device))


def uploaded(numbers: Sequence[int], device: str | torch.device) -> torch.Tensor:
    """Integers that are read once, such as the block ids of a step's copies, as int64 [n] on `device`.

    The host does not wait: the numbers leave through pinned memory, and torch hands that memory out again
    only after the copy has left it. Graphs need fixed addresses and take a `StagingBuffer`.
    """
    place = torch.device(device)
    staged = torch.tensor(numbers, dtype=torch.int64, pin_memory=place.type == "cuda")
    return staged.to(place, non_blocking=True)
