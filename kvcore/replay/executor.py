"""`InstantExecutor`: answers every step at once with tokens that nobody else has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.plan.config import KVCacheConfig
from kvcore.replay.tokens import TokenSource
from kvcore.worker.executor.base import Executor
from kvcore.worker.messages import SchedulerOutput, StepResult
from kvcore.worker.sanitizer import Sanitizer


class InstantExecutor(Executor):
    """No model and no memory: what a step would compute is never looked at.

    Args:
        tokens: Where generated tokens come from.
        sanitizer: Follows and checks every step; None for none.
    """

    def __init__(self, tokens: TokenSource, sanitizer: Sanitizer | None = None) -> None:
        self._tokens = tokens
        self._sanitizer = sanitizer

    def load_model(self) -> None:
        """There is none."""

    def cache_bytes(self) -> int:
        """None to spare: the plan says how large the cache would be."""
        return 0

    def initialize(self, configs: Sequence[KVCacheConfig]) -> None:
        """Nothing is allocated."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """One new token for each sample that is asked for."""
        if self._sanitizer is not None:
            self._sanitizer.step(output)
        count = int(output.draws.sum())
        return StepResult(output.step, self._tokens.fresh(count).astype(np.int64))
