"""`Request`: one sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvcore.engine.settings import SamplingParams
from kvcore.errors import RequestError
from kvcore.worker.messages import SampleAsk

FinishReason = Literal["stop", "length", "abort"]


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence: its prompt, what was generated, and how far the cache has come.

    Attributes:
        request_id: Unique name.
        prompt_ids: The prompt.
        sampling: How tokens are chosen.
        arrival: Order of arrival, also the order of service; samples of one prompt follow each other.
        sample: Which of the n samples of a prompt this is, from 0.
        forced: Tokens to append instead of the sampled ones (teacher forcing), or None.
        keep_logits: Whether the logits of every position are wanted.
        tokens: Prompt and generated tokens.
        num_computed: Tokens whose keys and values are in the cache.
        num_cached_tokens: Prompt tokens served by the prefix cache at the first admission; None before it.
        unforked: Samples still to be forked from this request when its prefill ends.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: int
    sample: int = 0
    forced: tuple[int, ...] | None = None
    keep_logits: bool = False
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int | None = None
    unforked: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_outputs(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def width(self) -> int:
        """Sequences that this request stands for: itself and the samples not forked yet."""
        return 1 + self.unforked

    def sample_asks(self) -> tuple[SampleAsk, ...]:
        """The draws to make from the last logits: one, or one for each unforked sample as well."""
        s = self.sampling
        return tuple(
            SampleAsk(s.temperature, s.top_p, s.top_k, s.seed + self.sample + i, self.num_outputs)
            for i in range(self.width)
        )

    def fork(self) -> list[Request]:
        """The other samples, as requests of their own with the same tokens and progress."""
        children = [
            Request(
                request_id=f"{self.request_id}#{self.sample + i}",
                prompt_ids=self.prompt_ids,
                sampling=self.sampling,
                arrival=self.arrival + i,
                sample=self.sample + i,
                keep_logits=self.keep_logits,
                tokens=list(self.tokens),
                num_computed=self.num_computed,
                num_cached_tokens=self.num_cached_tokens,
                status=self.status,
            )
            for i in range(1, self.width)
        ]
        self.unforked = 0
        return children


def check_request(
    prompt_ids: Sequence[int], sampling: SamplingParams, *, max_model_len: int, max_num_seqs: int, vocab_size: int
) -> None:
    """Raise `RequestError` for a request that can never be served."""
    if not prompt_ids:
        raise RequestError(
            "the prompt has no tokens",
            field="prompt",
            got="",
            allowed="at least one token",
            remedy="give a prompt that is not empty",
        )
    if len(prompt_ids) >= max_model_len:
        raise RequestError(
            "the prompt leaves no room for a single new token",
            field="prompt",
            got=f"{len(prompt_ids)} tokens",
            allowed=f"at most {max_model_len - 1} tokens",
            remedy="shorten the prompt or raise engine.max_model_len",
        )
    if vocab_size and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise RequestError(
            "a token id is outside the vocabulary",
            field="prompt",
            got=(min(prompt_ids), max(prompt_ids)),
            allowed=f"0 to {vocab_size - 1}",
        )
    limits: tuple[tuple[str, float, bool, str], ...] = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, ">= 1"),
        ("temperature", sampling.temperature, sampling.temperature >= 0, ">= 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "0 < top_p <= 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, ">= 0 (0 is off)"),
        ("n", sampling.n, 1 <= sampling.n <= max_num_seqs, f"1 to {max_num_seqs} (engine.max_num_seqs)"),
    )
    for name, got, holds, allowed in limits:
        if not holds:
            raise RequestError(f"sampling.{name} is out of range", field=f"sampling.{name}", got=got, allowed=allowed)
    if isinstance(sampling.stop, str):
        raise RequestError(
            "sampling.stop is one text, and would be read letter by letter",
            field="sampling.stop",
            got=sampling.stop,
            allowed="a tuple of texts",
        )
    if any(not s for s in sampling.stop):
        raise RequestError(
            "a stop string is empty", field="sampling.stop", got=sampling.stop, allowed="non-empty texts"
        )
