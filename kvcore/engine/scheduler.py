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

import numpy as np

from kvcore.engine.request import FinishReason, Request, RequestStatus, not_finite
from kvcore.engine.row_limits import RowLimits
from kvcore.engine.writers import Writers
from kvcore.errors import CapacityError, IntegrityError, KVCoreError, NotFiniteError, RequestError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.ragged import Ints
from kvcore.manage.step import Step, StepAllocation
from kvcore.worker.messages import Entry, SchedulerOutput, StepResult


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
        self._by_row: list[Request | None] = []
        self._rows: Ints | None = None  # of `running`, in its order; None when that has changed
        self._limits = RowLimits()
        self._entering: list[Request] = []  # the worker has no row of them yet
        self._dropped: list[int] = []
        self._ended: list[Request] = []  # without a token, since the last `update`

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self.requests:
            raise RequestError("a request of this id is being served", field="request_id", got=request.request_id)
        texts = frozenset() if request.sampling.ignore_eos else self.eos_token_ids | request.eos_token_ids
        request.end_ids = texts | set(request.sampling.stop_token_ids)
        self._limits.watch(request.end_ids)
        self._queue(request)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        self._live[request.key] = request
        self.requests.setdefault(request.request_id, []).append(request)

    def _queue(self, request: Request) -> None:
        # A request that keeps its logits must compute every position: it shares prefixes with itself alone.
        salt = f"{self.salt}\0{request.key}" if request.keep_logits else self.salt
        request.follow(self.manager.begin(request.tokens, salt=salt, name=request.title), self.manager.requests.tokens)
        request.status = RequestStatus.WAITING
        self._seat(request)
        insort(self.waiting, request, key=lambda r: r.arrival)

    def _seat(self, request: Request) -> None:
        row = request.row
        if row >= len(self._by_row):
            self._by_row += [None] * (row + 1)
            self._limits.widen(len(self._by_row))
        self._by_row[row] = request
        self._limits.set(request, self.max_model_len)

    def _run(self, request: Request) -> None:
        insort(self.running, request, key=lambda r: r.arrival)
        request.status = RequestStatus.RUNNING
        self._entering.append(request)
        self._rows = None

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
        self._rows = None
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        # What is not finite is wrong for everybody: nobody may find it again by its prefix.
        self._release(request, forget=isinstance(error, NotFiniteError))
        request.status, request.finish_reason, request.error = RequestStatus.FINISHED, reason, error

    def _release(self, request: Request, *, forget: bool = False) -> None:
        row = request.row
        request.stand_alone()
        self.manager.free([row], forget=forget)
        self._by_row[row] = None
        self._dropped.append(row)
        if request in self._entering:
            self._entering.remove(request)

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
        step, rows, counts, preempted = self._ask_for_running()
        admitted = 0
        if self.waiting and not preempted:
            admitted = self._admit(step, rows, counts)
        if not len(rows) and not admitted:
            return None
        given = self.manager.allocate(step)
        for row, hit in given.cached_tokens.items():
            self._count_admission(self._request(row), hit)
        return self._output(given)

    def _output(self, given: StepAllocation) -> SchedulerOutput:
        rows, computed, counts = given.rows, given.starts, given.ends - given.starts
        decodes = (counts == 1) & (computed > 0)
        many = np.count_nonzero(decodes) < len(decodes)
        if many:  # decodes first: kernels treat rows of one token apart
            order = np.argsort(~decodes, kind="stable")
            rows, computed, counts = rows[order], computed[order], counts[order]
        known = self.manager.requests
        lengths = known.known[rows]
        draws = np.where(computed + counts == lengths, self._limits.draws[rows], 0)
        if many:
            tokens = known.tokens.gather(rows, computed, counts)
        else:
            tokens = known.tokens.data[known.tokens.start[rows] + computed]
        entries = tuple(self._entry(request) for request in self._entering)
        left, self._dropped, self._entering = np.array(self._dropped, np.int32), [], []
        positions = lengths - self._limits.prompts[rows]
        integers = (n.astype(np.int32) for n in (rows, counts, computed, draws, positions, tokens))
        return SchedulerOutput(
            given.step, *integers, given.deltas, left, entries, given.copies, given.new_blocks, given.dead
        )

    def _entry(self, request: Request) -> Entry:
        return Entry(request.row, request.key, request.sample_ask(), request.sampling.min_tokens, request.keep_logits)

    def _request(self, row: int) -> Request:
        found = self._by_row[row]
        if found is None:
            raise IntegrityError("a step has a row of no request", field="row", got=row)
        return found

    def _count_admission(self, request: Request, hit: int) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(hit, len(request.prompt_ids))
            self.stats.prompt_tokens += len(request.prompt_ids)
            self.stats.cached_tokens += request.num_cached_tokens

    def _running_rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.array([request.row for request in self.running], np.int64)
        return self._rows

    def _ask_for_running(self) -> tuple[Step, Ints, Ints, bool]:
        """A step with the running requests, oldest first; preempts the youngest until they fit."""
        preempted = False
        known = self.manager.requests
        while True:
            step, rows = self.manager.begin_step(), self._running_rows()
            counts = known.known[rows] - known.computed[rows]
            ends = counts.cumsum()
            if len(rows) and ends[-1] > self.max_num_batched_tokens:
                counts = np.minimum(counts, self.max_num_batched_tokens - ends + counts)
            asked = counts > 0
            if np.count_nonzero(asked) < len(asked):
                rows, counts = rows[asked], counts[asked]
            if len(rows):
                step.add(rows, counts)
            if not (len(rows) and step.short):
                return step, rows, counts, preempted
            if len(self.running) == 1:
                alone = self.running[0]
                error = CapacityError(
                    f"request {alone.title} alone needs {step.short} blocks more than there are",
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
        self._rows = None
        self._release(request)
        self._queue(request)
        self.stats.preemptions += 1

    def _admit(self, step: Step, rows: Ints, counts: Ints) -> int:
        """Adds waiting requests to the step in order of arrival, as far as tokens, rows and blocks go."""
        budget = self.max_num_batched_tokens - int(counts.sum())
        width = sum(r.width for r in self.running)
        writers = Writers(self.hit_unit, self.manager.requests)
        writers.add([self._request(row) for row in writers.filling(rows).tolist()])
        admitted: list[Request] = []
        for request in self.waiting:
            if budget < 1 or width + request.width > self.max_num_seqs:
                break
            try:
                hit = self.manager.lookup(request.row)
                if writers.compute_next_of(request, hit):
                    continue  # for a few steps at most: whoever computes it is running
                count = min(int(self.manager.requests.known[request.row]) - hit, budget)
                if step.try_add(request.row, count):
                    break  # nobody overtakes: a large request is not starved by small ones behind it
            except BaseException:
                self.waiting = [r for r in self.waiting if r not in admitted]
                self.end(request, "abort")  # else it would fail every later step as well
                raise
            admitted.append(request)
            self._run(request)
            writers.add([request])
            budget -= count
            width += request.width
        if admitted:
            self.waiting = [r for r in self.waiting if r.status is RequestStatus.WAITING]
        return len(admitted)

    def abandon(self, output: SchedulerOutput | None = None) -> None:
        """Give up a step that failed: its requests end, and nothing that it was to compute can be hit.

        Args:
            output: The step; None when it failed before it was one: then everything that runs ends.
        """
        if output is None:
            keys = {r.key for r in self.running}
        else:
            found = [self._by_row[row] for row in output.rows.tolist()]
            keys = {r.key for r in found if r is not None}
            # Perhaps the worker never came to them; dropping twice does no harm, nor entering.
            self._dropped = [*output.left.tolist(), *self._dropped]
            late = [self._by_row[entry.row] for entry in output.entries]
            self._entering = [r for r in late if r is not None and r not in self._entering] + self._entering
        # A step that failed while it was taken in has children that no row names.
        ids = {self._live[key].request_id for key in keys if key in self._live}
        for request in [r for r in self._live.values() if r.key in keys or (r.request_id in ids and r.sample)]:
            self.end(request, "abort")
        for step in self.manager.steps_in_flight:
            self.manager.commit(step)
            self.manager.retire(step)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[tuple[Request, int | None]]:
        """Take in what a step produced; returns (request, new token) in the order of its rows.

        Requests that ended by length, EOS or numbers that are not finite are finished here, the last with no
        token; stop strings are the caller's. When it raises, `abandon` the step.
        """
        r = self.manager.requests
        rows, draws, ends = output.rows.astype(np.int64), output.draws, output.computed + output.counts
        if len(result.tokens) != int(draws.sum()):
            raise IntegrityError(
                "a worker drew another number of tokens than it was asked for",
                field="tokens",
                got=len(result.tokens),
                allowed=int(draws.sum()),
            )
        first = draws.cumsum() - draws
        wrong = {bad.row: bad.where for bad in result.not_finite}
        members = self.manager.members(output.step)
        # Some may have ended while the step was running.
        alive = np.isin(rows, members) if len(members) < len(rows) else np.ones(len(rows), np.bool_)
        apart = alive & ((draws > 1) | (self._limits.forced[rows] & (ends == r.known[rows])))
        apart[list(wrong)] = alive[list(wrong)]
        plain = (alive & ~apart & (draws == 1)).nonzero()[0]
        produced = [
            (i, self._request(row), token)
            for i, row, token in zip(
                plain.tolist(), rows[plain].tolist(), result.tokens[first[plain]].tolist(), strict=True
            )
        ]
        for i in apart.nonzero()[0].tolist():
            request = self._request(int(rows[i]))
            if i in wrong:
                self.end(request, "error", not_finite(request, wrong[i]))
                produced.append((i, request, None))
            elif request.forced is not None:
                produced.append((i, request, self._next_forced(request)))
            else:
                drawn = result.tokens[first[i] : first[i] + draws[i]].tolist()
                family = [request, *self._fork(request)]
                produced += [(i, member, token) for member, token in zip(family, drawn, strict=True)]
        if len(produced) > len(plain):
            produced.sort(key=lambda entry: entry[0])
        for i, logprobs in result.logprobs.items():
            members = [request for at, request, token in produced if at == i and token is not None]
            for member, told in zip(members, logprobs, strict=False):
                member.logprobs.append(told)
        self._take_in(output.step, [(request, token) for _, request, token in produced])
        return [(request, token) for _, request, token in produced]

    def _next_forced(self, request: Request) -> int | None:
        forced = request.forced or ()
        at = request.num_outputs
        if at < len(forced):
            return forced[at]
        self.end(request, "length")
        return None

    def _take_in(self, step: int, produced: list[tuple[Request, int | None]]) -> None:
        """Commit and retire a step with its new tokens, and end the requests that these end."""
        pairs = [(request, token) for request, token in produced if token is not None]
        rows = np.array([request.row for request, _ in pairs], np.int64)
        tokens = np.array([token for _, token in pairs], np.int64)
        self.manager.commit(step, rows, tokens)
        self.manager.retire(step)
        self.stats.output_tokens += len(pairs)
        full, watched = self._limits.ends(rows, tokens, self.manager.requests.known[rows])
        for i in (full | watched).nonzero()[0].tolist():
            request, token = pairs[i]
            if request.forced is None and (token in request.end_ids or full[i]):
                self.end(request, "stop" if token in request.end_ids else "length")

    def take_ended(self) -> list[Request]:
        """The requests that `schedule` has ended since the last call, because they can never go on."""
        ended, self._ended = self._ended, []
        return ended

    def _fork(self, request: Request) -> list[Request]:
        """One prefill becomes n sequences that share its blocks; each goes on from a token of its own."""
        children = request.fork()
        self._limits.set(request, self.max_model_len)
        rows = self.manager.fork(request.row, [c.title for c in children])
        for child, row in zip(children, rows, strict=True):
            child.follow(row, self.manager.requests.tokens)
            self._seat(child)
            self._enter(child)
            self._run(child)
        return children
