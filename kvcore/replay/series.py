"""`Series`: the state of the cache and of the queue along simulated time, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcore.engine.scheduler import Scheduler


class Sample(NamedTuple):
    """The state after a step; the columns of the CSV file.

    Attributes:
        seconds: Simulated time.
        steps: Steps so far.
        arrived: Requests so far, the refused ones included.
        waiting, running: Requests now.
        blocks_used: Blocks that requests hold.
        blocks_pending: Blocks of ended requests that a step in flight may still read.
        blocks_reusable: Free blocks whose content can still be hit.
        blocks_empty: Free blocks without content.
        prompt_tokens, cached_tokens: Of the requests admitted so far, and what the prefix cache gave them.
        output_tokens, preemptions, evictions: So far.
        hit_rate: cached over prompt tokens since the sample before; None where nobody was admitted.
        waste: Share of the slots in used blocks that hold no token yet.
    """

    seconds: float
    steps: int
    arrived: int
    waiting: int
    running: int
    blocks_used: int
    blocks_pending: int
    blocks_reusable: int
    blocks_empty: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    evictions: int
    hit_rate: float | None
    waste: float


class Series:
    """Takes a sample after the first step of every interval, and at the end.

    Args:
        scheduler: What is watched, its manager with it.
        block_sizes: Tokens of a block, by group.
        every: Length of an interval in seconds of simulated time.

    Attributes:
        samples: In order of time.
    """

    def __init__(self, scheduler: Scheduler, block_sizes: tuple[int, ...], every: float) -> None:
        self.samples: list[Sample] = []
        self._scheduler = scheduler
        self._block_sizes = block_sizes
        self._every = every
        self._due = 0.0

    def step(self, seconds: float, steps: int, arrived: int) -> None:
        """A step has ended."""
        if seconds >= self._due:
            self.take(seconds, steps, arrived)
            self._due = (seconds // self._every + 1) * self._every

    def take(self, seconds: float, steps: int, arrived: int) -> None:
        """Take a sample now."""
        scheduler, blocks = self._scheduler, self._scheduler.manager.stats()
        counts = scheduler.stats
        before = self.samples[-1] if self.samples else None
        prompt = counts.prompt_tokens - (before.prompt_tokens if before else 0)
        cached = counts.cached_tokens - (before.cached_tokens if before else 0)
        self.samples.append(
            Sample(
                seconds=seconds,
                steps=steps,
                arrived=arrived,
                waiting=len(scheduler.waiting),
                running=len(scheduler.running),
                blocks_used=blocks["blocks_used"],
                blocks_pending=blocks["blocks_pending"],
                blocks_reusable=blocks["blocks_reusable"],
                blocks_empty=blocks["blocks_free"] - blocks["blocks_reusable"],
                prompt_tokens=counts.prompt_tokens,
                cached_tokens=counts.cached_tokens,
                output_tokens=counts.output_tokens,
                preemptions=counts.preemptions,
                evictions=blocks["evictions"],
                hit_rate=cached / prompt if prompt else None,
                waste=self._waste(blocks["blocks_used"]),
            )
        )

    def _waste(self, used: int) -> float:
        """Only the last block of a row has slots without a token: a request of n tokens leaves -n mod P in it."""
        computed = self._scheduler.manager.requests.computed[self._scheduler.running_rows()]
        unwritten = sum(float((-computed % size).sum()) / size for size in self._block_sizes)
        return unwritten / used if used else 0.0

    def write_csv(self, path: Path) -> None:
        """All samples, with a header; where nothing was admitted the hit rate is empty."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Sample._fields)
            writer.writerows(self._rows())

    def _rows(self) -> Iterator[list[object]]:
        for sample in self.samples:
            yield [round(v, 6) if isinstance(v, float) else v for v in sample]
