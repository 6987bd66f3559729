"""`SamplingParams`: how the tokens of one request are chosen; the keys `sampling.*`."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import RequestError
from kvcore.settings.key import check, key

_OFF_PENALTY = 1.0


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The order of the filters is that of transformers' `generate`: penalties, then tokens that may not come yet, then
    temperature, top_k, top_p, min_p.
    """

    max_tokens: int = key(64, "most tokens to generate", least=1)
    min_tokens: int = key(0, "before these no end-of-text id, stop id or stop text ends the output", least=0)
    temperature: float = key(0.0, "0 is greedy", least=0)
    top_p: float = key(1.0, "nucleus filter; 1 is off", above=0, most=1)
    top_k: int = key(0, "keep the k likeliest; 0 is off", least=0)
    min_p: float = key(
        0.0, "keep tokens of at least this share of the likeliest one's probability; 0 is off", least=0, most=1
    )
    repetition_penalty: float = key(
        1.0, "divides positive and multiplies negative logits of tokens in prompt and output; 1 is off", above=0
    )
    presence_penalty: float = key(0.0, "subtracted from the logits of tokens in the output", least=-2, most=2)
    frequency_penalty: float = key(0.0, "subtracted for each time that a token is in the output", least=-2, most=2)
    seed: int = key(0, "sample i of a prompt draws from seed + i", least=0, most=2**63)
    n: int = key(1, "samples of each prompt, forked from one prefill", least=1)
    stop: tuple[str, ...] = key((), "texts that end the output, cut off; special tokens count by their text")
    stop_token_ids: tuple[int, ...] = key((), "ids that end the output, whatever ignore_eos says")
    ignore_eos: bool = key(False, "go on after the end-of-text token")
    logprobs: int | None = key(
        None, "log-probabilities of this many likeliest tokens beside the chosen one; none unless given", least=0
    )

    def __post_init__(self) -> None:
        """Types and bounds; what depends on the engine or the model is checked when a request is added.

        Raises:
            RequestError: A value has another type or is out of range.
        """
        check(self, "sampling", RequestError)
        if any(not text for text in self.stop):
            raise RequestError(
                "a stop string is empty", field="sampling.stop", got=self.stop, allowed="non-empty texts"
            )
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "sampling.min_tokens is out of range",
                field="sampling.min_tokens",
                got=self.min_tokens,
                allowed=f"at most sampling.max_tokens={self.max_tokens}",
            )

    @property
    def penalized(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != _OFF_PENALTY or bool(self.presence_penalty or self.frequency_penalty)
