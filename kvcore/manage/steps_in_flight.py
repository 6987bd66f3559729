"""`StepsInFlight`: what was allocated and is not committed yet."""

from __future__ import annotations

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.ragged import Ints


class StepsInFlight:
    """By number of the step, oldest first: the rows that are part of it, and how many tokens each then has."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[Ints, Ints]] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps."""
        return tuple(self._steps)

    def add(self, step: int, rows: Ints, ends: Ints) -> None:
        """A step was allocated."""
        self._steps[step] = rows, ends

    def of(self, step: int) -> tuple[Ints, Ints]:
        """Rows and ends of a step."""
        return self._steps[step]

    def due(self, step: int) -> tuple[Ints, Ints]:
        """Rows and ends of the step that is committed next.

        Raises:
            IntegrityError: It is not the oldest one.
        """
        oldest = next(iter(self._steps), None)
        if oldest is None or step != oldest:
            allowed = "none: no step is in flight" if oldest is None else oldest
            raise IntegrityError("steps are committed once each, in order", field="step", got=step, allowed=allowed)
        return self._steps[step]

    def done(self, step: int) -> None:
        """A step was committed."""
        del self._steps[step]

    def fork(self, parent: int, children: list[int]) -> None:
        """The children are part of every step of their parent."""
        more = np.array(children, np.int64)
        for step, (rows, ends) in self._steps.items():
            mine = ends[rows == parent]
            if len(mine):
                self._steps[step] = np.concatenate((rows, more)), np.concatenate((ends, np.repeat(mine, len(more))))

    def leave(self, rows: Ints) -> None:
        """These rows ended, and are part of no step any more."""
        for step, (members, ends) in self._steps.items():
            stay = ~np.isin(members, rows)
            self._steps[step] = members[stay], ends[stay]
