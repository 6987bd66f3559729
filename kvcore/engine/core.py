"""`EngineCore`: plans the cache, hands the plan to the executor, and turns the loop of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

from kvcore.engine.control_plane import make_manager, make_scheduler
from kvcore.engine.planning import eviction_policy, prepare_plan
from kvcore.engine.request import DERIVED, FinishReason, Request, check_request, check_tokens
from kvcore.engine.settings import EngineSettings, SamplingParams
from kvcore.errors import ConfigError, RequestError
from kvcore.plan.planner import Plan
from kvcore.registry.registry import Registry
from kvcore.worker.executor.base import Executor
from kvcore.worker.executor.inline import InlineExecutor
from kvcore.worker.model_runner import LogitsSink
from kvcore.worker.sampler import Sampler
from kvcore.worker.worker import Worker

Announce = Callable[[str], None]


class NewToken(NamedTuple):
    """One token of one request, and whether it was the last; no token where it ended without one."""

    request: Request
    token: int | None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, or None while it goes on."""
        return self.request.finish_reason


class EngineCore:
    """A model with its cache, ready to serve.

    Args:
        settings: What to build.
        registry: Installed plugins.
        eos_token_ids: Ids that end a text.
        progress: Called with a line of text before each long piece of work.
        logits_sink: Receives the logits of requests that keep them (scoring).

    Raises:
        UnsupportedModelError: `run` cannot serve this architecture; raised before weights load.
        CapacityError: Not one sequence of `max_model_len` fits.
        BackendError: No backend can serve a group as asked.
    """

    def __init__(
        self,
        settings: EngineSettings,
        registry: Registry,
        *,
        eos_token_ids: Sequence[int] = (),
        progress: Announce | None = None,
        logits_sink: LogitsSink | None = None,
    ) -> None:
        say = progress or (lambda _: None)
        self.settings = settings
        self.registry = registry
        refuse(settings)
        eviction_policy(settings.cache, registry)
        say("planning the cache")
        # Before the weights: a bad choice must not cost a minute of loading.
        first_plan, self.selection = prepare_plan(settings, registry, purpose="run")
        first_plan.require_fit()
        worker = Worker(settings, registry, Sampler(), logits_sink)
        self.executor: Executor = InlineExecutor(worker)
        say(f"loading {settings.facts.architecture} on {settings.device.kind}")
        self.executor.load_model()
        self.plan = self._plan_after_loading(first_plan)
        self.plan.require_fit()
        say("allocating and binding the cache")
        self.executor.initialize(self.plan.configs)
        self.manager = make_manager(settings, self.plan.configs[0], registry)
        self.scheduler = make_scheduler(settings, self.plan.configs[0], self.manager, eos_token_ids)
        self.seconds = 0.0
        self._arrivals = 0
        self._reserved: set[str] = set()
        self._names = 0

    def _plan_after_loading(self, first: Plan) -> Plan:
        cache = self.settings.cache
        asked = cache.memory is not None or cache.num_blocks is not None
        if asked or self.settings.device.kind == "cpu":
            return first
        plan, _ = prepare_plan(self.settings, self.registry, purpose="run", memory_bytes=self.executor.cache_bytes())
        return plan

    def new_name(self) -> str:
        """A name for one `add_request`, which no caller can have given or will give."""
        self._names += 1
        name = f"{DERIVED}r{self._names}"
        self._reserved.add(name)
        return name

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        forced: Sequence[int] | None = None,
        salt: str = "",
        keep_logits: bool = False,
        eos_token_ids: Iterable[int] = (),
    ) -> Request:
        """Queue a prompt of token ids.

        Args:
            request_id: A name not in use: any text that does not begin with NUL, or one of `new_name`.
            prompt_ids: The prompt.
            sampling: How tokens are chosen.
            forced: Tokens to append instead of sampled ones (teacher forcing); none is sampled, so prompt and
                forced tokens may fill `max_model_len`.
            salt: Only requests of equal salt share prefixes; any text without NUL, for one tenant of many.
            keep_logits: Send the logits of every position to the logits sink.
            eos_token_ids: Ids that end this text beside those of the model, such as a chat's end of turn.

        Raises:
            RequestError: The request can never be served, or its name is in use.
        """
        reserved = isinstance(request_id, str) and request_id in self._reserved
        if not isinstance(request_id, str) or (request_id.startswith(DERIVED) and not reserved):
            allowed = "a text that does not begin with NUL"
            raise RequestError(
                "this can be no request's name", field="request_id", got=repr(request_id), allowed=allowed
            )
        if not isinstance(salt, str) or "\0" in salt:
            raise RequestError("this can be no salt", field="salt", got=repr(salt), allowed="a text without NUL")
        if forced is None:
            self.check(prompt_ids, sampling)
        else:
            self.check_text([*prompt_ids, *forced])
        request = Request(
            request_id=request_id,
            prompt_ids=tuple(map(int, prompt_ids)),
            sampling=sampling,
            arrival=self._arrivals,
            forced=None if forced is None else tuple(map(int, forced)),
            salt=salt,
            keep_logits=keep_logits,
            unforked=sampling.n - 1 if forced is None else 0,
            eos_token_ids=frozenset(eos_token_ids),
        )
        self._arrivals += sampling.n
        self.scheduler.add(request)
        self._reserved.discard(request_id)
        return request

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise `RequestError` for a request that can never be served."""
        check_request(
            prompt_ids,
            sampling,
            max_model_len=self.settings.engine.max_model_len,
            max_num_seqs=self.settings.engine.max_num_seqs,
            vocab_size=self.settings.facts.vocab_size,
        )

    def check_text(self, token_ids: Sequence[int]) -> None:
        """Raise `RequestError` for tokens that can never be scored: none are sampled, so they may fill the model."""
        limit = self.settings.engine.max_model_len
        why = "the text is longer than the longest sequence"
        check_tokens(token_ids, self.settings.facts.vocab_size, longest=limit, why=why)

    def abort(self, request_id: str) -> None:
        """End all samples of a prompt now, in whatever state; unknown names are ignored: it may just have finished."""
        self._reserved.discard(request_id)  # perhaps it never came to be added
        self.scheduler.finish(request_id, "abort")

    def end(self, request: Request, reason: FinishReason) -> None:
        """End one sample for a reason that only its text shows (a stop string)."""
        self.scheduler.end(request, reason)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    def step(self) -> list[NewToken]:
        """One step: schedule, run, take in, tell observers. Empty when there was nothing to do.

        When any part of it raises, the requests of the step end as aborted, and the others go on.
        """
        started = time.perf_counter()
        output = self.scheduler.schedule()
        ended = [NewToken(request, None) for request in self.scheduler.take_ended()]
        if output is None:
            return ended
        try:
            produced = self.scheduler.update(output, self.executor.execute(output))
        except BaseException:  # an interrupt as well: the engine must serve on
            self.scheduler.abandon(output)
            raise
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self._tell_observers(output.step, output.num_tokens, seconds)
        if self.settings.cache.events:
            self.registry.cache_changed(self.manager.take_events())
        return [*ended, *starmap(NewToken, produced)]

    def _tell_observers(self, step: int, scheduled: int, seconds: float) -> None:
        blocks, counts = self.manager.stats(), self.scheduler.stats
        self.registry.step_finished(
            {
                "step": step,
                "seconds": seconds,
                "scheduled_tokens": scheduled,
                "num_running": len(self.scheduler.running),
                "num_waiting": len(self.scheduler.waiting),
                "preemptions": counts.preemptions,
                "blocks_used": blocks["blocks_used"],
                "blocks_total": blocks["blocks_total"],
                "prefix_hit_tokens": counts.cached_tokens,
                "prompt_tokens": counts.prompt_tokens,
                "output_tokens": counts.output_tokens,
                "copied_blocks": blocks["copied_blocks"],
                "evictions": blocks["evictions"],
                "blocks_cached": blocks["blocks_cached"],
            }
        )


def refuse(settings: EngineSettings) -> None:
    """Raise for a model or a setting that `run` cannot serve correctly, before anything is loaded."""
    facts = settings.facts
    facts.require_runnable(settings.engine.max_model_len)
    if settings.engine.max_model_len > facts.max_model_len:
        raise ConfigError(
            "the model was not made for sequences this long",
            field="engine.max_model_len",
            got=settings.engine.max_model_len,
            allowed=f"at most {facts.max_model_len}",
            remedy=f"set engine.max_model_len={facts.max_model_len} or less",
        )
