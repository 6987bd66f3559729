"""`Scheduler`: which tokens each step computes. It sees integers only: never a tensor, never a kernel.

Continuous batching with chunked prefill: every step gives each running request its next tokens (one
for a decode, as many as the budget allows for a prefill), oldest first, and then admits waiting
requests in order of arrival. When blocks run out the youngest running request is preempted: its blocks
are freed and it will be computed again, with whatever the prefix cache still holds of it.

A waiting request whose next block is just being computed by another one waits a step: then it is a hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from kvcore.engine.request import Request, RequestStatus, not_finite
from kvcore.engine.roster import Roster
from kvcore.engine.writers import Writers
from kvcore.errors import CapacityError, IntegrityError
from kvcore.manage.allocation import StepAllocation
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.ragged import Ints
from kvcore.manage.step import Step
from kvcore.worker.messages import Entry, SchedulerOutput, StepResult


class Scheduler(Roster):
    """Decides what runs, and keeps the requests.

    Args:
        manager: The blocks.
        max_model_len: Longest sequence in tokens.
        max_num_seqs: Most running sequences.
        max_num_batched_tokens: Most tokens of a step.
        eos_token_ids: Ids that end a sequence.
        salt: Isolates prefixes, see `KVCacheManager.begin`.
        hit_unit: Prefix hits are multiples of this many tokens; 0 without prefix caching.
        explain: Keep with each request why its prompt was not reused; the manager was made to know.
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
        explain: bool = False,
    ) -> None:
        super().__init__(manager, max_model_len=max_model_len, eos_token_ids=eos_token_ids, salt=salt)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.hit_unit = hit_unit
        self._explain = explain
        self._alone: Request | None = None  # runs with nobody else, see `_go_alone`

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
            if not len(rows) and not admitted and self.manager.large_pages and self._alone is None:
                self._go_alone(self.waiting[0])
                step = self.manager.begin_step()
                admitted = self._admit(step, rows, counts)
        if not len(rows) and not admitted:
            return None
        given = self.manager.allocate(step)
        if self._alone is not None and self._alone.row in given.cached_tokens:
            self.manager.reset_prefix_cache()  # so that nothing of it stays behind, scattered
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
        per_row = np.empty((5, len(rows)), np.int32)
        per_row[0], per_row[1], per_row[2], per_row[3] = rows, counts, computed, draws
        per_row[4] = lengths - self._limits.prompts[rows]
        return SchedulerOutput(
            given.step,
            rows=per_row[0],
            counts=per_row[1],
            computed=per_row[2],
            draws=per_row[3],
            positions=per_row[4],
            token_ids=tokens.astype(np.int32),
            deltas=given.deltas,
            left=left,
            entries=entries,
            copies=given.copies,
            new_blocks=given.new_blocks,
            dead=given.dead,
            freed=given.freed,
        )

    def _entry(self, request: Request) -> Entry:
        return Entry(request.row, request.key, request.sample_ask(), request.sampling.min_tokens, request.keep_logits)

    def _count_admission(self, request: Request, hit: int) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(hit, len(request.prompt_ids))
            self.stats.prompt_tokens += len(request.prompt_ids)
            self.stats.cached_tokens += request.num_cached_tokens
            if self._explain:
                request.explanation = self.manager.explain(request.row)

    def _ask_for_running(self) -> tuple[Step, Ints, Ints, bool]:
        """A step with the running requests, oldest first; preempts the youngest until they fit."""
        preempted = False
        known = self.manager.requests
        while True:
            step, rows = self.manager.begin_step(), self.running_rows()
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
                if self.manager.large_pages and alone is not self._alone and step.fits_together(alone.row):
                    self._preempt(alone)
                    self._go_alone(alone)
                    continue
                unit = "large pages" if self.manager.large_pages else "blocks"
                error = CapacityError(
                    f"request {alone.title} alone needs {step.short} {unit} more than there are",
                    field="cache.memory",
                    got=f"{len(alone.tokens)} tokens",
                    remedy="raise cache.memory or lower engine.max_model_len",
                )
                self.end(alone, "error", error)
                self._ended.append(alone)
                continue
            self._preempt(self.running[-1])
            preempted = True

    def _go_alone(self, request: Request) -> None:
        """Large pages are scattered: who fits where the blocks lie together starts again, and nobody beside it.

        What others left behind keeps pages from it that hold a few blocks each, and so does its own prefix. With the
        cache forgotten and nothing of it cached, its blocks fill page after page, as the plan has counted them.
        """
        self._alone = request
        self.manager.reset_prefix_cache()

    def _admit(self, step: Step, rows: Ints, counts: Ints) -> int:
        """Adds waiting requests to the step in order of arrival, as far as tokens, rows and blocks go."""
        budget = self.max_num_batched_tokens - int(counts.sum())
        width = len(self.running) + sum(map(attrgetter("unforked"), self.running))
        writers = Writers(self.hit_unit, self.manager.requests)
        writers.add([self._request(row) for row in writers.filling(rows).tolist()])
        admitted: list[Request] = []
        if self._alone is not None and self._alone.status is RequestStatus.FINISHED:
            self._alone = None
        for request in self.waiting if self._alone is None else [r for r in self.waiting if r is self._alone]:
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
        known = self.manager.requests.known
        rows, draws = output.rows.astype(np.int64), output.draws
        if len(result.tokens) != draws.sum():
            raise IntegrityError(
                "a worker drew another number of tokens than it was asked for",
                field="tokens",
                got=len(result.tokens),
                allowed=int(draws.sum()),
            )
        wrong = {bad.row: bad.where for bad in result.not_finite}
        members = self.manager.members(output.step)
        # Some may have ended while the step was running.
        alive = np.isin(rows, members) if len(members) < len(rows) else np.ones(len(rows), np.bool_)
        forced = self._limits.forced[rows] & (output.computed + output.counts == known[rows])
        apart = alive & ((draws > 1) | forced)
        if wrong:
            apart[list(wrong)] = alive[list(wrong)]
        plain = (alive & ~apart & (draws == 1)).nonzero()[0]
        first = draws.cumsum() - draws
        new_rows, new_tokens = rows[plain], result.tokens[first[plain]]
        produced: list[tuple[Request, int | None]]
        produced = list(zip(self._requests_of(new_rows), new_tokens.tolist(), strict=True))
        if np.count_nonzero(apart) or result.logprobs:
            places = plain.tolist()
            for i in apart.nonzero()[0].tolist():
                drawn = result.tokens[first[i] : first[i] + draws[i]].tolist()
                more = self._grow_apart(self._request(int(rows[i])), drawn, wrong.get(i))
                produced += more
                places += [i] * len(more)
                found = [(request.row, token) for request, token in more if token is not None]
                new_rows = np.append(new_rows, [row for row, _ in found]).astype(np.int64)
                new_tokens = np.append(new_tokens, [token for _, token in found]).astype(np.int64)
            order = sorted(range(len(places)), key=places.__getitem__)
            self._tell_logprobs(result, places, produced)
            produced = [produced[i] for i in order]
        self._take_in(output.step, new_rows, new_tokens)
        return produced

    def _grow_apart(self, request: Request, drawn: list[int], wrong: str | None) -> list[tuple[Request, int | None]]:
        """The new tokens of a request that goes wrong, is told its tokens, or parts into its samples."""
        if wrong is not None:
            self.end(request, "error", not_finite(request, wrong))
            return [(request, None)]
        if request.forced is not None:
            return [(request, self._next_forced(request))]
        return list(zip([request, *self._fork(request)], drawn, strict=True))

    @staticmethod
    def _tell_logprobs(result: StepResult, places: list[int], produced: list[tuple[Request, int | None]]) -> None:
        for place, (request, token) in zip(places, produced, strict=True):
            if token is not None and place in result.logprobs:
                request.logprobs.append(
                    result.logprobs[place][request.sample if len(result.logprobs[place]) > 1 else 0]
                )

    def _next_forced(self, request: Request) -> int | None:
        forced = request.forced or ()
        at = request.num_outputs
        if at < len(forced):
            return forced[at]
        self.end(request, "length")
        return None

    def _take_in(self, step: int, rows: Ints, tokens: Ints) -> None:
        """Commit and retire a step with its new tokens, and end the requests that these end."""
        self.manager.commit(step, rows, tokens)
        self.manager.retire(step)
        self.stats.output_tokens += len(rows)
        full, watched = self._limits.ends(rows, tokens, self.manager.requests.known[rows])
        for i in (full | watched).nonzero()[0].tolist():
            request, token = self._request(int(rows[i])), int(tokens[i])
            if request.forced is None and (token in request.end_ids or full[i]):
                self.end(request, "stop" if token in request.end_ids else "length")
