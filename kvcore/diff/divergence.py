"""`Divergence`: where the outputs of two backends on the same cache content part first, and by how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.testing.oracle.attention import Array


def as_array(tensor: torch.Tensor) -> Array:
    """A tensor's elements as float64 on the host."""
    return tensor.double().cpu().numpy()


class OutputRow(NamedTuple):
    """An output row.

    Attributes:
        layer: Layer.
        token: Position in its sequence.
        head: Query head.
        sequence: Which sequence: its place in the step of a case, or the prompt it belongs to.
        step: Step, from 1.
    """

    layer: int
    token: int
    head: int
    sequence: int
    step: int


@dataclass
class Divergence:
    """Compares outputs as they come, step by step and layer by layer.

    Attributes:
        first: The first row beyond the tolerance: in the first step, there in the first layer, there at the
            first token and head; None while all agree.
        first_error, first_tolerance: Its worst element.
        max_abs_error: The largest difference of all elements, infinite where one side alone is not finite.
        compared: Elements compared.
        stored: Kind of the content of each side, where the two were asked to store a plugin's.
    """

    first: OutputRow | None = None
    first_error: float = 0.0
    first_tolerance: float = 0.0
    max_abs_error: float = 0.0
    compared: int = 0
    stored: tuple[str, str] | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing lay beyond the tolerance."""
        return self.first is None

    def take(self, a_THV: Array, b_THV: Array, tolerance_THV: Array, locate: Callable[[int, int], OutputRow]) -> None:
        """Compare one layer of one step.

        Args:
            a_THV: Outputs of one backend.
            b_THV: Outputs of the other.
            tolerance_THV: How far they may lie apart.
            locate: From a row of the batch and a head to where that is.
        """
        with np.errstate(invalid="ignore"):
            same = (a_THV == b_THV) | (np.isnan(a_THV) & np.isnan(b_THV))
            error = np.where(same, 0.0, np.abs(a_THV - b_THV))
        error = np.where(np.isnan(error), np.inf, error)
        self.compared += error.size
        self.max_abs_error = max(self.max_abs_error, float(error.max(initial=0.0)))
        if self.first is not None:
            return
        rows, heads, _ = np.nonzero(error > tolerance_THV)
        if len(rows):
            row, head = int(rows[0]), int(heads[0])
            worst = int(np.argmax(error[row, head]))
            self.first = locate(row, head)
            self.first_error = float(error[row, head, worst])
            self.first_tolerance = float(tolerance_THV[row, head, worst])

    def as_dict(self) -> dict[str, Any]:
        """The JSON document."""
        found = None
        if self.first is not None:
            found = {**self.first._asdict(), "error": self.first_error, "tolerance": self.first_tolerance}
        return {"equal": self.equal, "first": found, "max_abs_error": self.max_abs_error, "compared": self.compared}
