"""Retentions: which tokens must stay in the cache, and how many blocks that can take.

All block counts follow from two facts. A range that starts at token 0 takes ``ceil(n / P)`` blocks of
P tokens. A range of n > 0 tokens at any offset touches at most ``ceil((n - 1) / P) + 1``.
Capacity, admission and run time all ask the same three methods, so that what was promised at start-up
can be scheduled. The family is open: a plugin adds a class through the hook `kvcore_retentions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvcore.errors import SpecError
from kvcore.spec.dtypes import ceil_div, positive


def touched_blocks(tokens: int, block_size: int) -> int:
    """Most blocks that a range of `tokens` tokens can touch, wherever it starts."""
    return 0 if tokens <= 0 else ceil_div(tokens - 1, block_size) + 1


def shared_budget(scheduled: int, sequences: int, block_size: int, first_costs: tuple[int, ...]) -> int:
    """Most blocks that requests sharing a step can take beyond what they hold between steps.

    A request pays `first_costs` scheduled tokens for its first extra blocks, at its worst offset, and
    a whole block of tokens for each later one. Requests of equal length meet their worst offset in the
    same step, so the cheap first blocks of all of them count.

    Args:
        scheduled: Tokens scheduled in the step, over all requests.
        sequences: Most requests in the step.
        block_size: Tokens of a block.
        first_costs: Tokens for each cheap block of one request, none above `block_size`.
    """
    total, left = 0, scheduled
    for cost in first_costs:
        count = min(sequences, left // cost)
        total, left = total + count, left - count * cost
    return total + left // block_size


class Retention(ABC):
    """Which tokens later queries may still read."""

    kind: ClassVar[str]

    @property
    def rate(self) -> int:
        """Tokens that one slot stands for."""
        return 1

    @classmethod
    def instead_of(cls, retention: Retention) -> Retention | None:
        """What serves in place of `retention` where `cache.retention=<kind>` asks for this class, or None.

        It keeps at least what `retention` keeps.
        """
        return None

    def within(self, longest: int) -> Retention:
        """What this is for sequences of at most `longest` tokens: `Full` where no query drops a token."""
        return Full() if self.first_needed(longest - 1) == 0 else self

    @abstractmethod
    def first_needed(self, position: int) -> int:
        """The first token that a query at `position`, or any later one, may read."""

    @abstractmethod
    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """Most blocks held between steps by a request that has grown to `tokens` tokens."""

    @abstractmethod
    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """Most blocks held during a step whose last `scheduled` tokens bring the request to `tokens`."""

    @abstractmethod
    def step_budget(self, scheduled: int, block_size: int, sequences: int = 1) -> int:
        """Blocks to keep free for a step of `scheduled` tokens in all, shared by `sequences` requests.

        However the tokens are split, the sum of `blocks_for_step` is at most the sum of
        `resident_blocks` plus this one budget.
        """


def _room(tokens: int, block_size: int) -> int:
    """Slots left over in the last of ``ceil(tokens / P)`` blocks."""
    return -tokens % block_size


def _first_costs(live: int, block_size: int) -> tuple[int, ...]:
    """Scheduled tokens that buy the first extra blocks of a live range at its worst offset.

    The bound ``ceil((n - 1) / P) + 1`` grows when n - 1 passes a multiple of P; the first token of an
    empty range takes a block of its own.
    """
    return (1, 1) if live == 0 else (_room(live - 1, block_size) + 1,)


class _FromZero(Retention):
    """Shared by retentions that never drop a token."""

    def within(self, longest: int) -> Retention:
        """The same at any length."""
        return self

    def first_needed(self, position: int) -> int:
        """Token 0."""
        return 0

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """``ceil(tokens / P)``."""
        return ceil_div(tokens, block_size)

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """``ceil(tokens / P)``: the scheduled tokens are among `tokens`."""
        return ceil_div(tokens, block_size)

    def step_budget(self, scheduled: int, block_size: int, sequences: int = 1) -> int:
        """0: nothing is held in a step that is not held after it."""
        return 0


@dataclass(frozen=True)
class Full(_FromZero):
    """Every token stays."""

    kind: ClassVar[str] = "full"


@dataclass(frozen=True)
class Compressed(_FromZero):
    """One entry for every `tokens` tokens, and every entry stays (DeepSeek-V4); a block holds P entries.

    Tokens that do not fill an entry yet lie in a state of the layer.
    """

    kind: ClassVar[str] = "compressed"

    tokens: int

    def __post_init__(self) -> None:
        positive("compress_ratio", self.tokens)

    @property
    def rate(self) -> int:
        """Tokens that one entry stands for."""
        return self.tokens

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """Of whole entries alone."""
        return ceil_div(tokens // self.tokens, block_size)

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """As between steps: entries are never taken back."""
        return self.resident_blocks(tokens, block_size)


@dataclass(frozen=True)
class Striped(_FromZero):
    """Every token stays, on one of `ranks` ranks that share the tokens: rank r keeps tokens r, r + ranks, ..."""

    kind: ClassVar[str] = "full"

    ranks: int

    def __post_init__(self) -> None:
        positive("parallel.decode_context", self.ranks)

    @property
    def rate(self) -> int:
        """Tokens of the sequence for one that a rank keeps."""
        return self.ranks

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """Of the rank that keeps most."""
        return ceil_div(ceil_div(tokens, self.ranks), block_size)

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """As between steps."""
        return self.resident_blocks(tokens, block_size)


@dataclass(frozen=True)
class Encoder(_FromZero):
    """The encoder's tokens stay, written once; at most `max_tokens` of them (cross attention)."""

    kind: ClassVar[str] = "encoder"

    max_tokens: int

    def __post_init__(self) -> None:
        positive("max_tokens", self.max_tokens)

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """All encoder tokens, however long the decoder's text is."""
        return ceil_div(self.max_tokens, block_size) if tokens > 0 else 0

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """As between steps."""
        return self.resident_blocks(tokens, block_size)


@dataclass(frozen=True)
class Window(Retention):
    """Key j is needed by query i when ``i - size < j <= i``; the first `keep_first` tokens stay too."""

    kind: ClassVar[str] = "window"

    size: int
    keep_first: int = 0

    def __post_init__(self) -> None:
        positive("sliding_window", self.size)
        if self.keep_first < 0:
            raise SpecError("keep_first is negative", field="keep_first", got=self.keep_first, allowed=">= 0")

    def first_needed(self, position: int) -> int:
        """``max(0, position - size + 1)``; the kept first tokens come on top."""
        return max(0, position - self.size + 1)

    def _bound(self, live: int, tokens: int, block_size: int) -> int:
        kept = ceil_div(self.keep_first, block_size)
        return min(ceil_div(tokens, block_size), kept + touched_blocks(live, block_size))

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """The ``size - 1`` tokens that the next query can still see."""
        return self._bound(self.size - 1, tokens, block_size)

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """``size - 1`` tokens before the first query, and the scheduled ones."""
        return self._bound(self.size - 1 + scheduled, tokens, block_size)

    def step_budget(self, scheduled: int, block_size: int, sequences: int = 1) -> int:
        """What the scheduled tokens can touch beyond the resident windows."""
        return shared_budget(scheduled, sequences, block_size, _first_costs(self.size - 1, block_size))


@dataclass(frozen=True)
class Chunk(Retention):
    """Key j is needed by query i when ``j // size == i // size`` and j <= i."""

    kind: ClassVar[str] = "chunk"

    size: int

    def __post_init__(self) -> None:
        positive("attention_chunk_size", self.size)

    def first_needed(self, position: int) -> int:
        """The first token of the chunk of `position`."""
        return position // self.size * self.size

    def _bound(self, live: int, tokens: int, block_size: int) -> int:
        # Chunks that start on a block boundary need no block for an unlucky offset.
        aligned = self.size % block_size == 0
        most = ceil_div(live, block_size) if aligned else touched_blocks(live, block_size)
        return min(ceil_div(tokens, block_size), most)

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """At most ``size - 1`` tokens of a chunk that is not complete."""
        return self._bound(self.size - 1, tokens, block_size)

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """The begun chunk, and the scheduled tokens, which may cross into later chunks."""
        return self._bound(self.size - 1 + scheduled, tokens, block_size)

    def step_budget(self, scheduled: int, block_size: int, sequences: int = 1) -> int:
        """What the scheduled tokens can touch beyond the resident chunks."""
        live = self.size - 1
        aligned = self.size % block_size == 0
        costs = (_room(live, block_size) + 1,) if aligned else _first_costs(live, block_size)
        return shared_budget(scheduled, sequences, block_size, costs)


@dataclass(frozen=True)
class Latest(Retention):
    """The newest `count` states of a request (recurrent layers); one block holds one state."""

    kind: ClassVar[str] = "latest"

    count: int = 1

    def __post_init__(self) -> None:
        positive("count", self.count)

    def within(self, longest: int) -> Retention:
        """The same at any length."""
        return self

    def first_needed(self, position: int) -> int:
        """States are not addressed by token."""
        return 0

    def resident_blocks(self, tokens: int, block_size: int) -> int:
        """`count` for any request that has begun."""
        return self.count if tokens > 0 else 0

    def blocks_for_step(self, tokens: int, scheduled: int, block_size: int) -> int:
        """As between steps: a state is updated in place."""
        return self.resident_blocks(tokens, block_size)

    def step_budget(self, scheduled: int, block_size: int, sequences: int = 1) -> int:
        """0: a state is updated in place."""
        return 0
