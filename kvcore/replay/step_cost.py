"""`StepCost`: how long a step takes in simulated time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """A step takes a constant, plus a constant a scheduled token; nothing of context length or batch shape.

    Attributes:
        step_seconds: Of every step: weights are read once, kernels launched.
        token_seconds: Of every token computed; those of a prefix hit are not.
    """

    step_seconds: float
    token_seconds: float

    def seconds(self, tokens: int) -> float:
        """Duration of a step that computes `tokens` tokens."""
        return self.step_seconds + self.token_seconds * tokens
