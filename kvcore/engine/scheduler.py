"""`Scheduler`: which tokens each step computes. It sees integers only: never a tensor, never a kernel.

Continuous batching with chunked prefill: every step gives each running request its next tokens (one
for a decode, as many as the budget allows for a prefill), oldest first, and then admits waiting
requests in order of arrival. When blocks run out the youngest running request is preempted: its blocks
are freed and it will be computed again, with whatever the prefix cache still holds of it.

A waiting request whose next block is just being computed by another one waits a step: then it is a hit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.engine.request import FinishReason, Request, RequestStatus
from kvcore.errors import CapacityError, IntegrityError, KVCoreError, NotFiniteError, RequestError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.step import ScheduledRequest
from kvcore.manage.step_plan import StepPlan
from kvcore.worker.messages import NO_TOKEN, ScheduledRow, SchedulerOutput, StepResult


@dataclass
class SchedulerStats:
    """Counts since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Scheduler:
    """Decides what runs, and keeps the requests.

    Args:
        manager: The blocks.
        max_model_len: Longest sequence in tokens.
        max_num_seqs: Most running sequences.
        max_num_batched_tokens: Most tokens of a step.
        eos_token_ids: Ids that end a sequence.
        salt: Isolates prefixes, see `KVCacheManager.begin`.
        hit_unit: Prefix hits are multiples of this many tokens; 0 without prefix caching.

    Attributes:
        requests: The samples of each prompt that are being served, by the caller's name for it.
        waiting, running: The same requests, in order of arrival; a preempted one goes back to its place.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: Iterable[int] = (),
        salt: str = "",
        hit_unit: int = 0,
    ) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.salt = salt
        self.hit_unit = hit_unit
        self.requests: dict[str, list[Request]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._live: dict[str, Request] = {}  # by key
        self._dropped: list[str] = []
        self._ended: list[Request] = []  # without a token, since the last `update`

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self.requests:
            raise RequestError("a request of this id is being served", field="request_id", got=request.request_id)
        texts = frozenset() if request.sampling.ignore_eos else self.eos_token_ids | request.eos_token_ids
        request.end_ids = texts | set(request.sampling.stop_token_ids)
        self._queue(request)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        self._live[request.key] = request
        self.requests.setdefault(request.request_id, []).append(request)

    def _queue(self, request: Request) -> None:
        # A request that keeps its logits must compute every position: it shares prefixes with itself alone.
        salt = f"{self.salt}\0{request.key}" if request.keep_logits else self.salt
        self.manager.begin(request.key, request.tokens, salt=salt)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        request.told = False
        insort(self.waiting, request, key=lambda r: r.arrival)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End all samples of a prompt now, whatever their state; a name that is not served is passed over."""
        for request in list(self.requests.get(request_id, ())):
            self.end(request, reason)

    def end(self, request: Request, reason: FinishReason, error: KVCoreError | None = None) -> None:
        """End one request now, if it has not ended; its blocks are freed, its output kept by the caller."""
        if self._live.pop(request.key, None) is None:
            return
        family = self.requests[request.request_id]
        family.remove(request)
        if not family:
            del self.requests[request.request_id]
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        # What is not finite is wrong for everybody: nobody may find it again by its prefix.
        self._release(request, forget=isinstance(error, NotFiniteError))
        request.status, request.finish_reason, request.error = RequestStatus.FINISHED, reason, error

    def _release(self, request: Request, *, forget: bool = False) -> None:
        self.manager.free([request.key], forget=forget)
        self._dropped.append(request.key)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when there is nothing to run.

        A request that can never be continued ends here, with its error; `update` and `take_ended` tell it.
        """
        try:
            return self._schedule()
        except BaseException:
            self.abandon()
            raise

    def _schedule(self) -> SchedulerOutput | None:
        step, asks, preempted = self._ask_for_running()
        if not preempted:
            asks += self._admit(step, asks)
        if not asks:
            return None
        allocation = self.manager.allocate(step)
        rows = []
        for ask in asks:
            request = self._live[ask.request_id]
            hit = allocation.cached_tokens.get(ask.request_id)
            if hit is not None:
                request.num_computed = hit
                self._count_admission(request, hit)
            first = request.num_computed
            last = first + ask.num_scheduled
            samples = request.sample_asks() if last == len(request.tokens) else ()
            request.told = request.told or bool(samples)
            rows.append(
                ScheduledRow(
                    request.key,
                    tuple(request.tokens[first:last]),
                    first,
                    allocation.deltas[request.key],
                    samples,
                    request.keep_logits,
                )
            )
        # Decodes first: kernels treat rows of one token apart.
        rows.sort(key=lambda r: not (len(r.token_ids) == 1 and r.num_computed > 0))
        dropped, self._dropped = tuple(self._dropped), []
        return SchedulerOutput(
            allocation.step, tuple(rows), dropped, allocation.copies, allocation.new_blocks, allocation.dead
        )

    def _count_admission(self, request: Request, hit: int) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(hit, len(request.prompt_ids))
            self.stats.prompt_tokens += len(request.prompt_ids)
            self.stats.cached_tokens += request.num_cached_tokens

    def _ask_for_running(self) -> tuple[StepPlan, list[ScheduledRequest], bool]:
        """A step with the running requests, oldest first; preempts the youngest until they fit."""
        preempted = False
        while True:
            step, asks = self.manager.begin_step(), []
            budget, short = self.max_num_batched_tokens, 0
            for request in self.running:
                count = min(len(request.tokens) - request.num_computed, budget)
                if count > 0:
                    ask = ScheduledRequest(request.key, count)
                    short = step.try_add(ask)
                    if short:
                        break
                    asks.append(ask)
                    budget -= count
            if not short:
                return step, asks, preempted
            if len(self.running) == 1:
                alone = self.running[0]
                error = CapacityError(
                    f"request {alone.title} alone needs {short} blocks more than there are",
                    field="cache.memory",
                    got=f"{len(alone.tokens)} tokens",
                    remedy="raise cache.memory or lower engine.max_model_len",
                )
                self.end(alone, "error", error)
                self._ended.append(alone)
                continue
            self._preempt(self.running[-1])
            preempted = True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self._queue(request)
        self.stats.preemptions += 1

    def _admit(self, step: StepPlan, asks: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Adds waiting requests to the step in order of arrival, as far as tokens, rows and blocks go."""
        if not self.waiting:
            return []
        admitted: list[ScheduledRequest] = []
        budget = self.max_num_batched_tokens - sum(a.num_scheduled for a in asks)
        width = sum(r.width for r in self.running)
        writers = _Writers(self.hit_unit)
        for asked in asks:
            writers.add(self._live[asked.request_id])
        for request in list(self.waiting):
            if budget < 1 or width + request.width > self.max_num_seqs:
                break
            try:
                hit = self.manager.lookup([request.key])[0]
                if writers.compute_next_of(request, hit):
                    continue  # for a few steps at most: whoever computes it is running
                ask = ScheduledRequest(request.key, min(len(request.tokens) - hit, budget))
                if step.try_add(ask):
                    break  # nobody overtakes: a large request is not starved by small ones behind it
            except BaseException:
                self.end(request, "abort")  # else it would fail every later step as well
                raise
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: r.arrival)
            request.status = RequestStatus.RUNNING
            admitted.append(ask)
            writers.add(request)
            budget -= ask.num_scheduled
            width += request.width
        return admitted

    def abandon(self, output: SchedulerOutput | None = None) -> None:
        """Give up a step that failed: its requests end, and nothing that it was to compute can be hit.

        Args:
            output: The step; None when it failed before it was one: then everything that runs ends.
        """
        keys = {r.key for r in self.running} if output is None else {row.request_id for row in output.rows}
        if output is not None:
            # Perhaps the worker never came to drop them; dropping twice does no harm.
            self._dropped = [*output.finished, *self._dropped]
        # A step that failed while it was taken in has children that no row names.
        ids = {self._live[key].request_id for key in keys if key in self._live}
        for request in [r for r in self._live.values() if r.key in keys or (r.request_id in ids and r.sample)]:
            self.end(request, "abort")
        for step in self.manager.steps_in_flight:
            self.manager.commit(step, {})
            self.manager.retire(step)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[tuple[Request, int | None]]:
        """Take in what a step produced; returns (request, new token) in the order of its rows.

        Requests that ended by length, EOS or numbers that are not finite are finished here, the last with no
        token; stop strings are the caller's. When it raises, `abandon` the step.
        """
        produced: list[tuple[Request, int | None]] = []
        appended: dict[str, list[int]] = {}
        wrong = {bad.row: bad.where for bad in result.not_finite}
        for i, (row, tokens) in enumerate(zip(output.rows, result.tokens, strict=True)):
            request = self._live.get(row.request_id)
            if request is None:  # ended while the step was running
                continue
            if i in wrong:
                self.end(request, "error", _not_finite(request, wrong[i]))
                produced.append((request, None))
                continue
            request.num_computed += len(row.token_ids)
            if request.forced is not None and request.num_computed == len(request.tokens):
                tokens = request.forced[request.num_outputs : request.num_outputs + 1]
                if not tokens:
                    self.end(request, "length")
                    produced.append((request, None))
            elif len(tokens) != len(row.samples):
                raise IntegrityError(
                    "a worker drew another number of tokens than it was asked for",
                    field="tokens",
                    got=len(tokens),
                    allowed=len(row.samples),
                )
            family = [request, *(self._fork(request) if len(tokens) > 1 else ())]
            for member, token in zip(family, tokens, strict=bool(tokens)):
                member.tokens.append(token)
                appended[member.key] = [token]
                produced.append((member, token))
            for member, told in zip(family, result.logprobs.get(i, ()), strict=False):
                member.logprobs.append(told)
        self.manager.commit(output.step, appended)
        self.manager.retire(output.step)
        self.stats.output_tokens += len(appended)
        for member, last in produced:
            reason = None if last is None else self._reason_to_end(member, last)
            if reason is not None:
                self.end(member, reason)
        return produced

    def take_ended(self) -> list[Request]:
        """The requests that `schedule` has ended since the last call, because they can never go on."""
        ended, self._ended = self._ended, []
        return ended

    def _fork(self, request: Request) -> list[Request]:
        """One prefill becomes n sequences that share its blocks; each goes on from a token of its own."""
        children = request.fork()
        self.manager.fork(request.key, [c.key for c in children])
        for child in children:
            self._enter(child)
            insort(self.running, child, key=lambda r: r.arrival)
        return children

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if request.forced is not None:
            return None
        if token in request.end_ids:
            return "stop"
        if request.num_outputs >= request.sampling.max_tokens or len(request.tokens) >= self.max_model_len:
            return "length"
        return None


class _Writers:
    """The requests whose blocks a step computes, by the tokens of their first block.

    Args:
        unit: Tokens of a block that can be hit; 0 without prefix caching.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._by_start: dict[tuple[int, ...], list[Request]] = {}

    def add(self, request: Request) -> None:
        """Count a request that is part of the step."""
        unit = self._unit
        # A decode inside a block completes none that others could wait for.
        if unit and not request.keep_logits and len(request.tokens) // unit > request.num_computed // unit:
            self._by_start.setdefault(tuple(request.tokens[:unit]), []).append(request)

    def compute_next_of(self, request: Request, hit: int) -> bool:
        """Whether one of them, not this one, computes the block that would lengthen this one's hit."""
        end = hit + self._unit
        if not self._unit or request.keep_logits or end >= len(request.tokens):
            return False
        others = self._by_start.get(tuple(request.tokens[: self._unit]))
        if others is None:
            return False
        block, wanted = request.tokens[hit:end], request.tokens[:end]
        # The last block first: requests of one prefix differ behind it.
        return any(o.num_computed < end and o.tokens[hit:end] == block and o.tokens[:end] == wanted for o in others)


def _not_finite(request: Request, where: str) -> NotFiniteError:
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
