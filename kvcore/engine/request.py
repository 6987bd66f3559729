"""`Request`: one sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Literal

import numpy as np

from kvcore.engine.sampling import SamplingParams
from kvcore.errors import KVCoreError, NotFiniteError, RequestError
from kvcore.manage.explain.explanation import Explanation
from kvcore.manage.prefix.block_hash import token_array
from kvcore.manage.ragged import Ints, Ragged
from kvcore.worker.messages import NO_TOKEN, Logprobs, SampleAsk

FinishReason = Literal["stop", "length", "abort", "error"]


_NO_TOKENS: Ints = np.zeros(0, np.uint32)
DERIVED = "\0"  # begins the names that the engine makes: of further samples, and of the prompts of `LLM`


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence: its prompt, what was generated, and how far the cache has come.

    Attributes:
        request_id: The caller's name for it; the n samples of a prompt have one name.
        prompt_ids: The prompt; a replay, which reads none of it, gives uint32.
        sampling: How tokens are chosen.
        arrival: Order of arrival, also the order of service; samples of one prompt follow each other.
        sample: Which of the n samples of a prompt this is, from 0.
        forced: Tokens to append instead of sampled ones (teacher forcing), or None. Such a request ends when all
            of its tokens are computed, and samples none.
        salt: Only requests of equal salt share prefixes.
        keep_logits: Whether the logits of every position are wanted.
        num_cached_tokens: Prompt tokens served by the prefix cache at the first admission; None before it.
        explanation: Why the rest of the prompt was not served by it, with `cache.explain`; None before, and without.
        unforked: Samples still to be forked from this request when its prefill ends.
        eos_token_ids: Ids that end a text, beside those of the model: the tokenizer's, and a chat's end of turn.
        end_ids: All tokens that end it, set when it is queued.
        logprobs: One entry a generated token, where they were asked for.
        error: What ended it, where `finish_reason` is error.
        row: Its row while the manager knows it, else -1.
    """

    request_id: str
    prompt_ids: tuple[int, ...] | Ints
    sampling: SamplingParams
    arrival: int
    sample: int = 0
    forced: tuple[int, ...] | None = None
    salt: str = ""
    keep_logits: bool = False
    num_cached_tokens: int | None = None
    explanation: Explanation | None = None
    unforked: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    eos_token_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    logprobs: list[Logprobs] = field(default_factory=list)
    error: KVCoreError | None = None
    row: int = -1
    _store: Ragged | None = None  # holds its tokens while it has a row
    _tokens: Ints = field(default_factory=lambda: _NO_TOKENS)  # else they are here, uint32

    def __post_init__(self) -> None:
        if not len(self._tokens):
            self._tokens = token_array(self.prompt_ids)

    def follow(self, row: int, store: Ragged) -> None:
        """From now on its tokens are those of a row."""
        self.row, self._store, self._tokens = row, store, _NO_TOKENS

    def stand_alone(self) -> None:
        """Its row goes: it keeps its tokens itself."""
        self._tokens = self.ids.copy()
        self.row, self._store = -1, None

    @property
    def ids(self) -> Ints:
        """Prompt and generated tokens, uint32; a view that is valid until anything changes."""
        return self._tokens if self._store is None else self._store.view(self.row)

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        tokens: list[int] = self.ids.tolist()
        return tokens

    @property
    def key(self) -> str:
        """Its name inside the engine; callers' names never begin with NUL, so no sample is taken for a request."""
        return f"{DERIVED}{self.sample}{DERIVED}{self.request_id}" if self.sample else self.request_id

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.request_id.lstrip(DERIVED)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_outputs(self) -> int:
        """How many tokens were generated."""
        count = len(self._tokens) if self._store is None else int(self._store.size[self.row])
        return count - len(self.prompt_ids)

    @property
    def width(self) -> int:
        """Sequences that this request stands for: itself and the samples not forked yet."""
        return 1 + self.unforked

    def sample_ask(self) -> SampleAsk:
        """What all its draws have in common; the tokens so far where a penalty counts them."""
        s = self.sampling
        ask = SampleAsk(
            s.temperature,
            s.top_p,
            s.top_k,
            s.seed + self.sample,
            0,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            banned=tuple(sorted(self.end_ids)) if s.min_tokens else (),
            logprobs=s.logprobs,
        )
        return ask._replace(prompt=tuple(self.prompt_ids), output=tuple(self.output_ids)) if s.penalized else ask

    def fork(self) -> list[Request]:
        """The other samples, as requests of their own with the same tokens and progress."""
        children = [
            Request(
                request_id=self.request_id,
                prompt_ids=self.prompt_ids,
                sampling=self.sampling,
                arrival=self.arrival + i,
                sample=self.sample + i,
                salt=self.salt,
                keep_logits=self.keep_logits,
                num_cached_tokens=self.num_cached_tokens,
                explanation=self.explanation,
                status=self.status,
                eos_token_ids=self.eos_token_ids,
                end_ids=self.end_ids,
                _tokens=self.ids.copy(),
            )
            for i in range(1, self.width)
        ]
        self.unforked = 0
        return children


def not_finite(request: Request, where: str) -> NotFiniteError:
    """The error of a request whose logits are not finite; `where` says which numbers were the first."""
    if where == NO_TOKEN:  # finite logits, of which the request allows none
        return NotFiniteError(
            f"no token can be chosen for request {request.title}: {where}",
            field="sampling.min_tokens",
            got=request.sampling.min_tokens,
            allowed="a token that does not end the text",
            remedy="ban fewer tokens by sampling.stop_token_ids, or lower sampling.min_tokens or the penalties",
        )
    return NotFiniteError(
        f"the logits of request {request.title} are not finite, so no token can be chosen: {where}",
        field="logits",
        got="NaN or infinity",
        allowed="finite numbers",
        remedy="look for NaN in the weights; in float16 for an overflow (model.dtype=bfloat16 or float32)",
    )


def check_tokens(token_ids: Sequence[int], vocab_size: int, *, longest: int, why: str) -> None:
    """Raise `RequestError` unless these are 1 to `longest` token ids; `why` says what a longer text would lack."""
    if not token_ids:
        raise RequestError(
            "the prompt has no tokens",
            field="prompt",
            got="",
            allowed="at least one token",
            remedy="give a prompt that is not empty",
        )
    strange = [t for t in token_ids if not isinstance(t, Integral) or isinstance(t, bool)]
    if strange:
        raise RequestError("a token id is no integer", field="prompt", got=repr(strange[0]), allowed="integers")
    if len(token_ids) > longest:
        raise RequestError(
            why,
            field="prompt",
            got=f"{len(token_ids)} tokens",
            allowed=f"at most {longest} tokens",
            remedy="shorten the prompt or raise engine.max_model_len",
        )
    # Without a vocabulary in the config, what a block table can hold of them is the only limit.
    largest = (vocab_size or 1 << 31) - 1
    if not 0 <= min(token_ids) <= max(token_ids) <= largest:
        raise RequestError(
            "a token id is outside the vocabulary",
            field="prompt",
            got=(min(token_ids), max(token_ids)),
            allowed=f"0 to {largest}",
        )


def check_request(
    prompt_ids: Sequence[int], sampling: SamplingParams, *, max_model_len: int, max_num_seqs: int, vocab_size: int
) -> None:
    """Raise `RequestError` for a request that can never be served."""
    why = "the prompt leaves no room for a single new token"
    check_tokens(prompt_ids, vocab_size, longest=max_model_len - 1, why=why)
    if sampling.n > max_num_seqs:
        raise RequestError(
            "sampling.n is out of range",
            field="sampling.n",
            got=sampling.n,
            allowed=f"1 to {max_num_seqs} (engine.max_num_seqs)",
        )
    if vocab_size and not all(0 <= i < vocab_size for i in sampling.stop_token_ids):
        raise RequestError(
            "a stop id is outside the vocabulary",
            field="sampling.stop_token_ids",
            got=list(sampling.stop_token_ids),
            allowed=f"0 to {vocab_size - 1}",
        )
