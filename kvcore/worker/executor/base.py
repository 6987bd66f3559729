"""`Executor`: how the engine reaches its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcore.plan.config import KVCacheConfig
from kvcore.worker.messages import SchedulerOutput, StepResult


class Executor(ABC):
    """Runs every rank of one engine. The calls come in this order, the last one once a step."""

    @abstractmethod
    def load_model(self) -> None:
        """Load the weights on every rank."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that the tightest rank can spare for its arena, by the memory profile."""

    @abstractmethod
    def initialize(self, configs: Sequence[KVCacheConfig]) -> None:
        """Allocate, view and bind: each worker takes the config of its own global rank."""

    @abstractmethod
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step on every rank; the result of the first."""
