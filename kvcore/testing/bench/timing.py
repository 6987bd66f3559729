"""Interleaved timing: one call of each method a round, so that a busy moment hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]


def interleaved(calls: Mapping[str, Call], rounds: int, device: str, warm: int = 2) -> dict[str, float]:
    """Median seconds of each call.

    Args:
        calls: Methods by name.
        rounds: Timed rounds; every round times each method once.
        device: ``cuda`` is timed with events, everything else by the clock.
        warm: Rounds before those, untimed: compilation, caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    timer = _on_device if device == "cuda" else _on_host
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


def _on_device(call: Call) -> float:
    # The cache of the device is emptied by what the other methods read in between.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
