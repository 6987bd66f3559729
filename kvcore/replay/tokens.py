"""`TokenSource`: token ids for prompts that a trace only counts or names by hashes.

No model reads them, so they need not be of its vocabulary: they are chosen so that prompts begin alike exactly where
the trace says so.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.arrival import Arrival

RUN = 512  # tokens that one hash id stands for
_NAMED = 1 << 30  # ids below are of named runs, those above never come twice


class TokenSource:
    """Hands out token ids."""

    def __init__(self) -> None:
        self._next = _NAMED

    def prompt(self, arrival: Arrival) -> NDArray[np.uint32]:
        """The prompt of a request."""
        if arrival.hash_ids is None:
            return self.fresh(arrival.prompt_tokens)
        return named_tokens(arrival.hash_ids)[: arrival.prompt_tokens]

    def fresh(self, length: int) -> NDArray[np.uint32]:
        """Tokens of which none was handed out before."""
        first = self._next
        self._next += length
        return np.arange(first, self._next, dtype=np.uint32)


def named_tokens(hash_ids: tuple[int, ...]) -> NDArray[np.uint32]:
    """The 512 fixed pseudo-random tokens of each hash id, one run after the other; below 2**30.

    Token i of run h is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from seed 0 at step 512 h + i + 1.
    """
    z = np.repeat(np.asarray(hash_ids, np.uint64) * np.uint64(RUN), RUN)
    z += np.tile(np.arange(1, RUN + 1, dtype=np.uint64), len(hash_ids))
    z *= np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(34)).astype(np.uint32)
