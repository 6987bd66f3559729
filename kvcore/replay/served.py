"""`Served`: what became of one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.engine.request import Request


@dataclass(slots=True)
class Served:
    """One request that was taken in; times are seconds of simulated time.

    Attributes:
        arrived: When it came.
        prompt_tokens: Length of its prompt.
        first_token: When its first token was there; None before.
        ended: When it ended; None before.
        cached_tokens: Prompt tokens that the prefix cache gave it when it was first admitted.
        output_tokens: Tokens it generated.
        missed: The other prompt tokens by reason, with `cache.explain`.
        failed: Whether it ran out of cache although it was alone.
    """

    arrived: float
    prompt_tokens: int
    first_token: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    missed: dict[str, int] | None = None
    failed: bool = False

    def end(self, request: Request, seconds: float) -> None:
        """Keep what is counted of a request that has ended."""
        self.ended = seconds
        self.cached_tokens = request.num_cached_tokens or 0
        self.output_tokens = request.num_outputs
        self.missed = None if request.explanation is None else request.explanation.by_reason()
        self.failed = request.error is not None
