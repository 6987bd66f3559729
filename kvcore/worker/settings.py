"""What one worker is built from, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.attention.declaration import DeviceFacts
from kvcore.models.facts import ModelFacts
from kvcore.plan.capacity import Limits


@dataclass(frozen=True)
class WorkerSettings:
    """One rank's share of the engine's settings.

    Attributes:
        facts: The model.
        model_path: Directory with config and weights.
        device: Where to run; `kind` names the torch device.
        limits: Longest sequence, most tokens and sequences of a step.
        utilization: Share of the device's total memory that may be used in all.
        options: Options of each backend, by its name.
        sanitize: Poison cache content when it dies.
        global_rank: Rank over the cluster.
        local_rank: Rank on this machine: the device's index.
    """

    facts: ModelFacts
    model_path: str
    device: DeviceFacts
    limits: Limits
    utilization: float = 0.9
    options: Mapping[str, Any] = field(default_factory=dict)
    sanitize: bool = False
    global_rank: int = 0
    local_rank: int = 0

    @property
    def torch_device(self) -> str:
        """``cpu``, or ``cuda:<local rank>`` (torch calls ROCm devices cuda as well)."""
        return "cpu" if self.device.kind == "cpu" else f"cuda:{self.local_rank}"
