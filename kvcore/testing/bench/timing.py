"""Interleaved timing: one call of each method a round, so that a busy moment hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
# Bytes zeroed before a timed call on a device: more than its second-level cache holds (50 MB on an H200).
FLUSH_BYTES = 1 << 28
# How often: about a millisecond of device work, longer than the host takes to launch what is timed.
FLUSHES = 16


def interleaved(calls: Mapping[str, Call], rounds: int, device: str, warm: int = 2) -> dict[str, float]:
    """Median seconds of each call.

    Args:
        calls: Methods by name.
        rounds: Timed rounds; every round times each method once.
        device: ``cuda`` is timed with events, from a cold cache and without the host's launching; everything
            else by the clock.
        warm: Rounds before those, untimed: compilation, caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    timer: Callable[[Call], float] = DeviceTimer(device) if device == "cuda" else _on_host
    for number in range(warm + rounds):
        for name, call in calls.items():
            seconds = timer(call)
            if number >= warm:
                taken[name].append(seconds)
    return {name: statistics.median(found) for name, found in taken.items()}


def copy_bandwidth(device: str, nbytes: int = 1 << 28) -> float:
    """Bytes a second that a plain copy reads and writes on this device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, 7, device)["copy"]
    return 2 * nbytes / seconds


def _on_host(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class DeviceTimer:
    """Times calls by events on the device's stream.

    The device is still busy with zeroing a large buffer while the host launches the call: so nothing that
    the call reads is in the second-level cache, as between the layers of a model, and the host's own
    time, which a captured graph would not spend, is not counted.

    Args:
        device: Where the calls run.
        nbytes: Size of the buffer.
    """

    def __init__(self, device: str, nbytes: int = FLUSH_BYTES) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        """Seconds of one call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(FLUSHES):
            self._buffer.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
