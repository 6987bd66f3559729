"""Index arithmetic of a step on the host: where each token of the flat batch comes from and goes.

scheduled [2, 5, 3]   query_start_loc [0, 2, 7, 10]
computed  [0, 0, 0]   positions 0 1 0 1 2 3 4 0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

Int32Array = npt.NDArray[np.int32]
PADDING_SLOT = -1


def query_start_loc(scheduled: Sequence[int]) -> npt.NDArray[np.int32]:
    """int32 [S + 1]: prefix sums of the scheduled tokens, starting at 0."""
    starts = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(scheduled, out=starts[1:])
    return starts


def token_positions(scheduled: Sequence[int], computed: Sequence[int]) -> npt.NDArray[np.int64]:
    """int64 [T]: for each token, its position in its sequence."""
    starts = query_start_loc(scheduled)
    offsets = np.asarray(computed, np.int64) - starts[:-1]
    return np.arange(starts[-1], dtype=np.int64) + np.repeat(offsets, scheduled)


def local_length(tokens: Int32Array, world: int, rank: int) -> Int32Array:
    """How many of the first `tokens` tokens of each sequence lie on `rank`: token i lies on rank ``i % world``."""
    return (tokens - rank + world - 1) // world


def check_ranks(world: int, rank: int) -> None:
    """Raise `ConfigError` unless 0 <= rank < world."""
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(
            "an interleaved context needs a rank below its world size",
            field="parallel.decode_context",
            got=(world, rank),
            allowed="0 <= rank < world",
        )


def dummy_split(num_tokens: int, num_seqs: int) -> list[int]:
    """Tokens of each request in a batch that only measures memory: even, the rest to the last.

    Raises:
        ConfigError: Some request would get no token.
    """
    if num_seqs < 1 or num_tokens < num_seqs:
        raise ConfigError(
            "every request of a dummy batch needs a token",
            field="num_tokens",
            got=(num_tokens, num_seqs),
            allowed="num_tokens >= num_seqs >= 1",
        )
    each = num_tokens // num_seqs
    return [each] * (num_seqs - 1) + [num_tokens - each * (num_seqs - 1)]
