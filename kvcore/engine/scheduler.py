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

from kvcore.engine.request import FinishReason, Request, Status
from kvcore.errors import CapacityError, RequestError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.step import Ask
from kvcore.worker.messages import ScheduledRow, SchedulerOutput, StepResult


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
        self.requests: dict[str, Request] = {}
        # Both in order of arrival; a preempted request goes back to its place.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._dropped: list[str] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self.requests:
            raise RequestError("a request of this id is being served", field="request_id", got=request.request_id)
        self.requests[request.request_id] = request
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.status = Status.WAITING
        request.num_computed = 0
        # A request that keeps its logits must compute every position: it shares prefixes with itself alone.
        salt = f"{self.salt}\0{request.request_id}" if request.keep_logits else self.salt
        self.manager.begin(request.request_id, request.tokens, salt=salt)
        insort(self.waiting, request, key=lambda r: r.arrival)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request now, whatever its state; its blocks are freed, its output kept by the caller."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._release(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def _release(self, request: Request) -> None:
        self.manager.free([request.request_id])
        self._dropped.append(request.request_id)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when there is nothing to run."""
        asks, preempted = self._ask_for_running()
        if not preempted:
            asks += self._admit(asks)
        if not asks:
            return None
        allocation = self.manager.allocate(asks)
        rows = []
        for ask in asks:
            request = self.requests[ask.request_id]
            hit = allocation.cached_tokens.get(ask.request_id)
            if hit is not None:
                request.num_computed = hit
                self._count_admission(request, hit)
            first = request.num_computed
            last = first + ask.num_scheduled
            samples = request.sample_asks() if last == len(request.tokens) else ()
            rows.append(
                ScheduledRow(
                    request.request_id,
                    tuple(request.tokens[first:last]),
                    first,
                    allocation.deltas[request.request_id],
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

    def _ask_for_running(self) -> tuple[list[Ask], bool]:
        """Asks for the running requests, oldest first; preempts the youngest until they fit."""
        preempted = False
        while True:
            asks, budget = [], self.max_num_batched_tokens
            for request in self.running:
                count = min(len(request.tokens) - request.num_computed, budget)
                if count > 0:
                    asks.append(Ask(request.request_id, count))
                    budget -= count
            short = self.manager.blocks_short(asks) if asks else 0
            if not short:
                return asks, preempted
            if len(self.running) == 1:
                raise CapacityError(
                    f"request {self.running[0].request_id} alone needs {short} blocks more than there are",
                    field="cache.memory",
                    got=f"{len(self.running[0].tokens)} tokens",
                    remedy="raise cache.memory or lower engine.max_model_len",
                )
            self._preempt(self.running[-1])
            preempted = True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self._queue(request)
        self.stats.preemptions += 1

    def _admit(self, asks: list[Ask]) -> list[Ask]:
        """Asks for waiting requests in order of arrival, as far as tokens, rows and blocks go."""
        admitted: list[Ask] = []
        budget = self.max_num_batched_tokens - sum(a.num_scheduled for a in asks)
        width = sum(r.width for r in self.running)
        for request in list(self.waiting):
            if budget < 1 or width + request.width > self.max_num_seqs:
                break
            hit = self.manager.lookup([request.request_id])[0]
            if self._is_being_computed(request, hit, [*asks, *admitted]):
                continue  # for a few steps at most: whoever computes it is running
            ask = Ask(request.request_id, min(len(request.tokens) - hit, budget))
            if self.manager.blocks_short([*asks, *admitted, ask]):
                break  # nobody overtakes: a large request is not starved by small ones behind it
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: r.arrival)
            request.status = Status.RUNNING
            admitted.append(ask)
            budget -= ask.num_scheduled
            width += request.width
        return admitted

    def _is_being_computed(self, request: Request, hit: int, asks: Iterable[Ask]) -> bool:
        """Whether this step computes, for another request, the block that would lengthen this one's hit."""
        end = hit + self.hit_unit
        if not self.hit_unit or request.keep_logits or end >= len(request.tokens):
            return False
        wanted = request.tokens[:end]
        for ask in asks:
            other = self.requests[ask.request_id]
            if other.num_computed < end and not other.keep_logits and other.tokens[:end] == wanted:
                return True
        return False

    def abandon(self, output: SchedulerOutput) -> None:
        """Give up a step that failed: its requests end, and nothing that it was to compute can be hit."""
        for row in output.rows:
            self.finish(row.request_id, "abort")
        # Perhaps the worker never came to drop them; dropping twice does no harm.
        self._dropped = [*output.finished, *self._dropped]
        self.manager.commit(output.step, {})
        self.manager.retire(output.step)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[tuple[Request, int]]:
        """Take in what a step produced; returns (request, new token) in the order of its rows.

        Requests that ended by length or EOS are finished here; stop strings are the caller's.
        """
        produced: list[tuple[Request, int]] = []
        appended: dict[str, list[int]] = {}
        for row, tokens in zip(output.rows, result.tokens, strict=True):
            request = self.requests.get(row.request_id)
            if request is None:  # ended while the step was running
                continue
            request.num_computed += len(row.token_ids)
            family = [request, *(self._fork(request) if len(tokens) > 1 else ())]
            for member, token in zip(family, tokens, strict=bool(tokens)):
                appended[member.request_id] = [self._append(member, token)]
                produced.append((member, member.tokens[-1]))
        self.manager.commit(output.step, appended)
        self.manager.retire(output.step)
        for request, token in produced:
            reason = self._ended(request, token)
            if reason is not None:
                self.finish(request.request_id, reason)
        return produced

    def _append(self, request: Request, token: int) -> int:
        if request.forced is not None and request.num_outputs < len(request.forced):
            token = request.forced[request.num_outputs]
        request.tokens.append(token)
        self.stats.output_tokens += 1
        return token

    def _fork(self, request: Request) -> list[Request]:
        """One prefill becomes n sequences that share its blocks; each goes on from a token of its own."""
        children = request.fork()
        self.manager.fork(request.request_id, [c.request_id for c in children])
        for child in children:
            self.requests[child.request_id] = child
            insort(self.running, child, key=lambda r: r.arrival)
        return children

    def _ended(self, request: Request, token: int) -> FinishReason | None:
        if token in self.eos_token_ids and not request.sampling.ignore_eos:
            return "stop"
        if request.num_outputs >= request.sampling.max_tokens or len(request.tokens) >= self.max_model_len:
            return "length"
        return None
