"""`Writers`: who computes, in this step, the block that another request waits for."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.engine.request import Request
from kvcore.manage.ragged import Ints
from kvcore.manage.requests import Requests


class Writers:
    """The requests whose blocks a step computes, by the tokens of their first block.

    Args:
        unit: Tokens of a block that can be hit; 0 without prefix caching.
        known: What the manager knows of each row.
    """

    def __init__(self, unit: int, known: Requests) -> None:
        self._unit = unit
        self._known = known
        self._by_start: dict[bytes, list[int]] = {}

    def filling(self, rows: Ints) -> Ints:
        """Those of `rows` that fill a block; a decode inside a block completes none that others could wait for."""
        if not self._unit:
            return rows[:0]
        r = self._known
        return rows[r.known[rows] // self._unit > r.committed[rows] // self._unit]

    def add(self, requests: Iterable[Request]) -> None:
        """Count requests that are part of the step."""
        for request in requests:
            if self._unit and not request.keep_logits:
                tokens = self._known.tokens.view(request.row)
                if len(tokens) >= self._unit:
                    self._by_start.setdefault(tokens[: self._unit].tobytes(), []).append(request.row)

    def compute_next_of(self, request: Request, hit: int) -> bool:
        """Whether one of them, not this one, computes the block that would lengthen this one's hit."""
        if not self._by_start or request.keep_logits:
            return False
        r = self._known
        end = (hit // self._unit + 1) * self._unit
        if end >= r.known[request.row]:
            return False
        tokens = r.tokens.view(request.row)
        others = self._by_start.get(tokens[: self._unit].tobytes(), ())
        wanted = tokens[:end].tobytes()
        return any(r.committed[o] < end and r.tokens.view(o)[:end].tobytes() == wanted for o in others)
