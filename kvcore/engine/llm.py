"""`LLM`: prompts in, texts out; whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvcore.engine.core import Announce, EngineCore
from kvcore.engine.output import TextStream
from kvcore.engine.request import FinishReason, Request
from kvcore.engine.settings import EngineSettings, SamplingParams
from kvcore.errors import ConfigError, IntegrityError, KVCoreError, RequestError
from kvcore.manage.explain.explanation import Explanation
from kvcore.models.tokenizer import Tokenizer, eos_token_ids
from kvcore.plan.planner import Plan
from kvcore.registry.registry import Registry
from kvcore.worker.messages import Logprobs

OnProgress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Output:
    """One finished sample of one prompt.

    Attributes:
        prompt: The prompt as given.
        text: The decoding without special tokens, cut before a stop string.
        token_ids: The generated ids, the EOS that ended them included.
        finish_reason: stop, length, abort or error.
        num_cached_tokens: Prompt tokens that the prefix cache served.
        error: What went wrong, where the reason is error.
        explanation: Where the reuse of the prompt ended and why, with `cache.explain=true`; None without, and for a
            request that was never admitted.
        stop_reason: The stop string or the id of `sampling.stop_token_ids` that ended it.
        logprobs: For each token, where `sampling.logprobs` asks for them, (id, log-probability) of the token and of
            the likeliest ones, under the model's own logits.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    error: KVCoreError | None = None
    explanation: Explanation | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class StreamEvent:
    """A piece of text, as soon as it is certain.

    Attributes:
        prompt_index: Which prompt.
        sample: Which of its n samples.
        text: New text, possibly empty (half a character, or the beginning of a stop string).
        token_id: The token behind it; None where the sample ended without one.
        output: The whole sample, on its last event.
    """

    prompt_index: int
    sample: int
    text: str
    token_id: int | None
    output: Output | None


class LLM:
    """A model that answers.

    Args:
        settings: What to build, see `EngineSettings`; `kvcore.LLM` makes them from overrides.
        registry: Installed plugins.
        progress: Called with a line of text before each long piece of work.
        tokenizer: The model's tokenizer, where it is loaded already.
    """

    def __init__(
        self,
        settings: EngineSettings,
        registry: Registry,
        progress: Announce | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if settings.model_path is None:
            raise ConfigError("a model directory is needed to run", field="model.path", got=None)
        self._kept: dict[str, dict[int, torch.Tensor]] = {}
        self._path = settings.model_path
        self._tokenizer = tokenizer
        self.core = EngineCore(
            settings,
            registry,
            eos_token_ids=eos_token_ids(settings.model_path),
            progress=progress,
            logits_sink=self._keep_logits,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; loaded when text is first needed, since scoring needs none."""
        return self._tokenizer or Tokenizer.load(self._path)

    @property
    def plan(self) -> Plan:
        """The plan that the cache was built from."""
        return self.core.plan

    @property
    def backends(self) -> dict[str, str | None]:
        """The backend of each KV group, by ``<index> <kind>``."""
        groups = self.plan.configs[0].kv_cache_groups
        return {f"{g.index} {g.spec.kind}": g.backend for g in groups}

    def generate(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool = False,
        salts: Sequence[str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Output]:
        """Answer all prompts in one continuous batch.

        Args:
            prompts: Texts.
            sampling: How tokens are chosen; the default is greedy, 64 tokens.
            chat: Wrap each prompt in the tokenizer's chat template.
            salts: One for each prompt: only prompts of equal salt share prefixes.
            on_progress: Called after each token with (samples finished, samples in all, tokens so far).

        Returns:
            Outputs in the order of the prompts, n for each.

        Raises:
            RequestError: A prompt can never be served, or a stream of this model is still open; nothing has
                run then.
        """
        sampling = sampling or SamplingParams()
        done: dict[tuple[int, int], Output] = {}
        for tokens, event in enumerate(self.stream(prompts, sampling, chat=chat, salts=salts), 1):
            if event.output is not None:
                done[event.prompt_index, event.sample] = event.output
            if on_progress is not None:
                on_progress(len(done), len(prompts) * sampling.n, tokens)
        return [done[key] for key in sorted(done)]

    def stream(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool = False,
        salts: Sequence[str] | None = None,
    ) -> Iterator[StreamEvent]:
        """Answer all prompts in one continuous batch, yielding text as it comes.

        Closing the iterator early aborts what is left. Arguments and errors as in `generate`.
        """
        sampling = sampling or SamplingParams()
        self._check_idle()
        _check_texts(prompts)
        if salts is not None and (isinstance(salts, str) or len(salts) != len(prompts)):
            raise RequestError("there is one salt a prompt", field="salts", got=salts, allowed=f"{len(prompts)} texts")
        encoded = [self.tokenizer.encode(prompt, chat=chat) for prompt in prompts]
        for ids in encoded:
            self.core.check(ids, sampling)
        ends = {*self.tokenizer.eos_token_ids, *(self.tokenizer.turn_ids if chat else ())}
        roots = {self.core.new_name(): i for i in range(len(prompts))}
        texts: dict[tuple[int, int], TextStream] = {}
        try:
            for request_id, i in roots.items():
                salt = salts[i] if salts is not None else ""
                self.core.add_request(request_id, encoded[i], sampling, salt=salt, eos_token_ids=ends)
            while self.core.has_unfinished:
                for new in self.core.step():
                    if new.request.request_id not in roots:  # somebody's own, added to `core` meanwhile
                        continue
                    i = roots[new.request.request_id]
                    samples = [new.request.sample]
                    if new.token is None:  # those that were not forked yet end with it
                        samples += range(new.request.sample + 1, new.request.sample + new.request.width)
                    for sample in samples:
                        text = texts.setdefault(
                            (i, sample), TextStream(self.tokenizer, sampling.stop, sampling.min_tokens)
                        )
                        yield self._event((i, sample), prompts[i], new.request, new.token, text)
        finally:
            for request_id in roots:
                self.core.abort(request_id)

    def _event(
        self, index: tuple[int, int], prompt: str, request: Request, token: int | None, stream: TextStream
    ) -> StreamEvent:
        text = "" if token is None else stream.push(token)
        if request.finish_reason is not None:
            text += stream.finish()
        if stream.stopped:
            self.core.end(request, "stop")
        reason: FinishReason | None = "stop" if stream.stopped else request.finish_reason
        output = None
        if reason is not None:
            ids = tuple(request.output_ids)
            stopped_by = stream.stop_reason
            output = Output(
                prompt=prompt,
                text=stream.text,
                token_ids=ids,
                finish_reason=reason,
                num_cached_tokens=request.num_cached_tokens or 0,
                error=request.error,
                explanation=request.explanation,
                stop_reason=token if stopped_by is None and token in request.sampling.stop_token_ids else stopped_by,
                logprobs=tuple(request.logprobs),
            )
        return StreamEvent(*index, text, token, output)

    def score(
        self, token_ids: Sequence[Sequence[int]], *, prompt_lens: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Teacher-forced logits of whole sequences, through the same cache, batch and kernels.

        Args:
            token_ids: Sequences of token ids.
            prompt_lens: How many tokens of each are prefilled; the rest is fed one token a step, as
                a decode would. Default: all but none are decoded.

        Returns:
            For each sequence float32 [len, V]: row i predicts token i + 1.

        Raises:
            RequestError: A text can never be scored; nothing has run then.
            NotFiniteError: The logits of a text are not finite.
        """
        self._check_idle()
        for ids in token_ids:
            self.core.check_text(ids)
        lens = [len(ids) for ids in token_ids] if prompt_lens is None else list(prompt_lens)
        _check_prompt_lens(token_ids, lens)
        requests: list[Request] = []
        try:
            for ids, prompt in zip(token_ids, lens, strict=True):
                forced = tuple(ids[prompt:])
                request = self.core.add_request(
                    self.core.new_name(), ids[:prompt], SamplingParams(), forced=forced, keep_logits=True
                )
                requests.append(request)
                self._kept[request.key] = {}
            while self.core.has_unfinished:
                for new in self.core.step():
                    if new.request.error is not None:
                        raise new.request.error
            return [self._collect(request.key, len(ids)) for request, ids in zip(requests, token_ids, strict=True)]
        finally:
            for request in requests:
                self.core.abort(request.request_id)
                self._kept.pop(request.key, None)

    def _keep_logits(self, request_id: str, first: int, logits_NV: torch.Tensor) -> None:
        if request_id in self._kept:  # else somebody's own, added to `core`, of whom nobody will ask for them
            self._kept[request_id].update(enumerate(logits_NV.float().cpu(), first))

    def _collect(self, name: str, length: int) -> torch.Tensor:
        rows = self._kept.pop(name)
        if sorted(rows) != list(range(length)):
            raise IntegrityError("not every position was computed", field="score", got=len(rows), allowed=length)
        return torch.stack([rows[i] for i in range(length)])

    def _check_idle(self) -> None:
        if self.core.has_unfinished:
            raise RequestError(
                "this model is still answering: one stream at a time",
                field="prompts",
                got=f"{len(self.core.scheduler.requests)} sequences not finished",
                remedy="read the open stream to its end or close() it, or add_request() to `core` yourself",
            )

    def stats(self) -> dict[str, Any]:
        """Counts since the start, as `kvcore run` prints them; seconds are those spent in steps."""
        counts, blocks, seconds = self.core.scheduler.stats, self.core.manager.stats(), self.core.seconds
        return {
            "prompt_tokens": counts.prompt_tokens,
            "output_tokens": counts.output_tokens,
            "cached_tokens": counts.cached_tokens,
            "seconds": seconds,
            "tokens_per_second": counts.output_tokens / seconds if seconds else 0.0,
            "preemptions": counts.preemptions,
            "prefix_hit_rate": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else 0.0,
            "peak_blocks": blocks["peak_blocks"],
            "total_blocks": blocks["blocks_total"],
            "copied_blocks": blocks["copied_blocks"],
        }


def _check_texts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str):
        raise RequestError(
            "prompts is one text, and would be read letter by letter",
            field="prompts",
            got=prompts,
            allowed="a list of texts",
            remedy="put the text into a list",
        )
    for prompt in prompts:
        # The half of a surrogate pair stands for bytes that were never UTF-8.
        if not isinstance(prompt, str) or any("\ud800" <= c <= "\udfff" for c in prompt):
            raise RequestError("a prompt is not a text", field="prompts", got=ascii(prompt), allowed="Unicode text")


def _check_prompt_lens(token_ids: Sequence[Sequence[int]], lens: Sequence[int]) -> None:
    if len(lens) != len(token_ids):
        raise RequestError(
            "every text needs its own prompt length",
            field="prompt_lens",
            got=f"{len(lens)} lengths",
            allowed=f"{len(token_ids)} lengths",
        )
    for ids, length in zip(token_ids, lens, strict=True):
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= len(ids):
            raise RequestError(
                "a prompt length is out of range", field="prompt_lens", got=length, allowed=f"1 to {len(ids)}"
            )
