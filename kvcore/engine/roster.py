"""`Roster`: who is served: who waits, who runs, and under which row each is known."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvcore.engine.request import FinishReason, Request, RequestStatus
from kvcore.engine.row_limits import RowLimits
from kvcore.errors import IntegrityError, KVCoreError, NotFiniteError, RequestError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.ragged import Ints


@dataclass
class SchedulerStats:
    """Counts since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Roster:
    """Keeps the requests from `add` to their end.

    Args:
        manager: The blocks.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Ids that end a sequence.
        salt: Isolates prefixes, see `KVCacheManager.begin`.

    Attributes:
        requests: The samples of each prompt that are being served, by the caller's name for it.
        waiting, running: The same requests, in order of arrival; a preempted one goes back to its place.
    """

    def __init__(
        self, manager: KVCacheManager, *, max_model_len: int, eos_token_ids: Iterable[int] = (), salt: str = ""
    ) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.salt = salt
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
        salt = f"{self.salt}\0{request.salt}" if request.salt else self.salt
        # A request that keeps its logits must compute every position: it shares prefixes with itself alone.
        salt = f"{salt}\0\0{request.key}" if request.keep_logits else salt
        request.follow(self.manager.begin(request.ids, salt=salt, name=request.title), self.manager.requests.tokens)
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

    def _request(self, row: int) -> Request:
        found = self._by_row[row]
        if found is None:
            raise IntegrityError("a step has a row of no request", field="row", got=row)
        return found

    def _requests_of(self, rows: Ints) -> list[Request]:
        """The requests of these rows, all of which are taken."""
        return [request for request in map(self._by_row.__getitem__, rows.tolist()) if request is not None]

    def running_rows(self) -> Ints:
        """The rows of `running`, in its order."""
        if self._rows is None:
            self._rows = np.array([request.row for request in self.running], np.int64)
        return self._rows

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._rows = None
        self._release(request)
        self._queue(request)
        self.stats.preemptions += 1

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
