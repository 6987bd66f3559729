"""`Replay`: arrivals in, steps turned, simulated time on the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Literal

from kvcore.engine.request import Request
from kvcore.engine.sampling import SamplingParams
from kvcore.engine.scheduler import Scheduler
from kvcore.errors import IntegrityError
from kvcore.replay.arrival import Arrival
from kvcore.replay.executor import InstantExecutor
from kvcore.replay.series import Series
from kvcore.replay.served import Served
from kvcore.replay.step_cost import StepCost
from kvcore.replay.tokens import TokenSource
from kvcore.replay.trace import Trace
from kvcore.worker.sanitizer import Sanitizer

Pace = Literal["trace", "one_by_one"]
OnProgress = Callable[[float], None]


class Replay:
    """One run of a trace through a scheduler and its manager.

    A step begins with everybody who has arrived by then, and ends when `cost` says so. While nobody is there the
    clock jumps to the next arrival.

    Args:
        trace: Who comes when.
        scheduler: The real one, over the real manager, both new.
        cost: Duration of a step.
        pace: ``trace`` keeps its times; ``one_by_one`` lets each request finish before the next one arrives.
        most_output: Generate at most so many tokens a request; None as many as the trace says.
        series: Is shown the state after each step.
        sanitizer: Checks every step; None for none.

    Attributes:
        seconds: Simulated time.
        steps: Steps so far.
        refused: Requests that could never be served.
        served: What became of each of the others, in order of their ends.
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        cost: StepCost,
        series: Series,
        *,
        pace: Pace = "trace",
        most_output: int | None = None,
        sanitizer: Sanitizer | None = None,
    ) -> None:
        self.trace = trace
        self.scheduler = scheduler
        self.series = series
        self.seconds = 0.0
        self.steps = 0
        self.arrived = 0
        self.refused: list[Arrival] = []
        self.served: list[Served] = []
        self.wall_seconds = 0.0
        self._cost = cost
        self._one_by_one = pace == "one_by_one"
        self._most_output = most_output
        self._tokens = TokenSource()
        self._executor = InstantExecutor(self._tokens, sanitizer)
        self._under_way: dict[str, Served] = {}

    def run(self, progress: OnProgress | None = None) -> None:
        """Serve the whole trace; `progress` is told the share of requests that have arrived."""
        started = time.perf_counter()
        while self._take_arrivals() or self._jump():
            self._step()
            self.series.step(self.seconds, self.steps, self.arrived)
            if progress is not None and self.steps % 256 == 0:
                progress(self.arrived / len(self.trace.arrivals))
        self.series.take(self.seconds, self.steps, self.arrived)
        self.wall_seconds = time.perf_counter() - started

    def _take_arrivals(self) -> bool:
        """Queue whoever has arrived; whether there is anything to do."""
        arrivals, scheduler = self.trace.arrivals, self.scheduler
        while self.arrived < len(arrivals) and arrivals[self.arrived].second <= self.seconds:
            if self._one_by_one and scheduler.has_unfinished:
                break
            self._arrive(arrivals[self.arrived], self.arrived)
            self.arrived += 1
        return scheduler.has_unfinished

    def _jump(self) -> bool:
        """Nobody is there: on to the next arrival, if there is one that can be served."""
        while self.arrived < len(self.trace.arrivals):
            self.seconds = max(self.seconds, self.trace.arrivals[self.arrived].second)
            if self._take_arrivals():
                return True
        return False

    def _arrive(self, arrival: Arrival, index: int) -> None:
        if arrival.prompt_tokens >= self.scheduler.max_model_len:
            self.refused.append(arrival)
            return
        output = arrival.output_tokens if self._most_output is None else min(arrival.output_tokens, self._most_output)
        prompt = self._tokens.prompt(arrival)
        request = Request(f"r{index}", prompt, _sampling(output), index)
        # One that had to wait for the one before it came when that one ended.
        came = self.seconds if self._one_by_one else arrival.second
        self._under_way[request.request_id] = Served(came, len(prompt))
        self.scheduler.add(request)

    def _step(self) -> None:
        scheduler = self.scheduler
        output = scheduler.schedule()
        for request in scheduler.take_ended():
            self._end(request)
        if output is None:
            if scheduler.has_unfinished:
                raise IntegrityError(
                    "requests wait and no step can be made", field="waiting", got=len(scheduler.waiting), allowed=0
                )
            return
        self.seconds += self._cost.seconds(output.num_tokens)
        self.steps += 1
        for request, _ in scheduler.update(output, self._executor.execute(output)):
            served = self._under_way[request.request_id]
            if served.first_token is None:
                served.first_token = self.seconds
            if request.finish_reason is not None:
                self._end(request)

    def _end(self, request: Request) -> None:
        served = self._under_way.pop(request.request_id)
        served.end(request, self.seconds)
        self.served.append(served)


@cache
def _sampling(tokens: int) -> SamplingParams:
    """Exactly so many tokens, whatever they are."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True)
