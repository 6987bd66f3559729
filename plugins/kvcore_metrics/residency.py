"""`Residency`: how long content stays in the prefix cache, measured on a sample of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvcore.backend import Event, Removed, Stored

_ALL = 2**32


class Residency:
    """Follows blocks from `Stored` to `Removed`. Their digests choose them, so every engine samples the same content.

    Args:
        share: Of the blocks, 0 to 1.
        clock: Tells seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._below = int(share * _ALL)
        self._clock = clock
        self._stored: dict[tuple[int, bytes], float] = {}

    def hear(self, events: Iterable[Event]) -> list[float]:
        """Seconds that each sampled block was cached which was removed now; a reset ends the measurement of all."""
        now, ended = self._clock(), []
        for event in events:
            if isinstance(event, Stored):
                if int.from_bytes(event.digest[:4], "little") < self._below:
                    self._stored[event.group, event.digest] = now
            elif isinstance(event, Removed):
                stored = self._stored.pop((event.group, event.digest), None)
                if stored is not None:
                    ended.append(now - stored)
            else:
                self._stored.clear()
        return ended
