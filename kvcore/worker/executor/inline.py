"""The inline executor: one worker, in the engine's own process."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import ConfigError
from kvcore.plan.config import KVCacheConfig
from kvcore.worker.executor.base import Executor
from kvcore.worker.messages import SchedulerOutput, StepResult
from kvcore.worker.worker import Worker


class InlineExecutor(Executor):
    """Calls its only worker directly.

    Args:
        worker: Rank 0.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def load_model(self) -> None:
        """See `Executor`."""
        self.worker.load_model()

    def cache_bytes(self) -> int:
        """See `Executor`."""
        return self.worker.cache_bytes()

    def initialize(self, configs: Sequence[KVCacheConfig]) -> None:
        """See `Executor`; there is one rank."""
        mine = [c for c in configs if c.global_rank == self.worker.global_rank]
        if len(mine) != 1 or len(configs) != 1:
            raise ConfigError(
                "the inline executor runs one rank",
                field="executor",
                got=[c.global_rank for c in configs],
                allowed=[self.worker.global_rank],
            )
        self.worker.initialize(mine[0])

    def execute(self, output: SchedulerOutput) -> StepResult:
        """See `Executor`."""
        return self.worker.execute(output)
