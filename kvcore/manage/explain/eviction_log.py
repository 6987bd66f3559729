"""`EvictionLog`: the last prefixes that were forgotten: when, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvcore.manage.ragged import Ints

Cause = Literal["evicted", "reset", "withdrawn"]
_CAUSES: tuple[Cause, ...] = ("evicted", "reset", "withdrawn")
_LEAST_TAIL, _TAIL_SHARE = 1024, 32
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Forgotten(NamedTuple):
    """How content ceased to be found.

    Attributes:
        cause: ``evicted``: its block was handed out. ``reset``: the cache was cleared. ``withdrawn``: what computed it
            turned out to be wrong.
        step: The step before which that happened.
        request: For whom the block was evicted; else None.
    """

    cause: Cause
    step: int
    request: str | None


class EvictionLog:
    """A ring of the last `size` entries, found by digest.

    A digest is remembered by 64 of its bits. All but the newest entries are sorted by them, so a search costs a
    bisection; an entry takes 33 bytes in arrays, and a share of the dictionary of those that are not sorted yet.

    Args:
        size: Entries that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._keys: Ints = np.zeros(size, np.uint64)
        self._steps: Ints = np.zeros(size, np.int32)
        self._causes: Ints = np.zeros(size, np.uint8)
        self._requests: list[str | None] = [None] * size
        self._count = 0  # ever; entry i lies at i % size
        self._sorted_keys: Ints = np.zeros(0, np.uint64)
        self._sorted_at: Ints = np.zeros(0, np.int32)
        self._tail: dict[int, int] = {}
        self._most_tail = max(_LEAST_TAIL, size // _TAIL_SHARE)

    def add(
        self, groups: Sequence[int], digests: Sequence[bytes], cause: Cause, step: int, requests: Sequence[str | None]
    ) -> None:
        """These were forgotten, in this order; `requests` is for whom."""
        keys = _keys(groups, digests)
        for key, request in zip(keys.tolist(), requests, strict=True):
            at = self._count % self.size
            self._keys[at], self._steps[at], self._causes[at] = key, step, _CAUSES.index(cause)
            self._requests[at] = request
            self._tail[key] = at
            self._count += 1
        if len(self._tail) > self._most_tail:
            self._sort()

    def find(self, group: int, digests: Sequence[bytes]) -> list[Forgotten | None]:
        """The newest entry of each digest; None where none is remembered."""
        keys = _keys([group] * len(digests), digests)
        places = np.full(len(keys), -1, np.int64)
        if len(self._sorted_keys):
            nearest = np.searchsorted(self._sorted_keys, keys, side="right") - 1
            candidates = self._sorted_at[nearest]
            # Of a place that was overwritten since, the ring holds another key.
            found = (self._sorted_keys[nearest] == keys) & (self._keys[candidates] == keys)
            places[found] = candidates[found]
        return [self._entry(self._tail.get(k, p), k) for k, p in zip(keys.tolist(), places.tolist(), strict=True)]

    def _entry(self, at: int, key: int) -> Forgotten | None:
        if at < 0 or int(self._keys[at]) != key:
            return None
        return Forgotten(_CAUSES[self._causes[at]], int(self._steps[at]), self._requests[at])

    def _sort(self) -> None:
        """Take the newest entries into the sorted ones; of equal keys the newest comes last."""
        kept = min(self._count, self.size)
        places = np.arange(self._count - kept, self._count) % self.size
        order = np.argsort(self._keys[places], kind="stable")
        self._sorted_at = places[order].astype(np.int32)
        self._sorted_keys = self._keys[self._sorted_at]
        self._tail.clear()


def _keys(groups: Sequence[int], digests: Sequence[bytes]) -> Ints:
    keys = np.frombuffer(b"".join(d[:8] for d in digests), np.uint64)
    mixed: Ints = keys ^ np.asarray(groups, np.uint64) * _MIX
    return mixed
