"""`Texts`: what a worker knows of the requests that run: how their tokens are drawn, and which they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.ragged import Ints
from kvcore.worker.messages import Entry, SampleAsk, SchedulerOutput


@dataclass
class _Text:
    """A request; `tokens` only where a penalty counts them."""

    entry: Entry
    prompt: int
    tokens: list[int]


class Texts:
    """By row, from the step in which a request enters to the one in which it leaves."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._keeping: set[int] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._texts)

    def enter(self, entry: Entry) -> None:
        """A request takes its row."""
        tokens = [*entry.ask.prompt, *entry.ask.output]
        self._texts[entry.row] = _Text(entry, len(entry.ask.prompt), tokens)
        self._keeping.discard(entry.row)
        if entry.keep_logits:
            self._keeping.add(entry.row)

    def leave(self, row: int) -> None:
        """A request ended, if it was there."""
        self._texts.pop(row, None)
        self._keeping.discard(row)

    def name(self, row: int) -> str:
        """The name of the request."""
        return self._known(row).entry.request_id

    def keeps_logits(self, rows: Ints) -> Ints:
        """Bool [n]: whether the logits of every position are wanted."""
        if not self._keeping:
            return np.zeros(len(rows), np.bool_)
        return np.array([row in self._keeping for row in rows.tolist()], np.bool_)

    def asks(self, output: SchedulerOutput) -> list[Sequence[SampleAsk]]:
        """For each row of a step its draws, with the tokens that penalties count; called once a step."""
        found: list[Sequence[SampleAsk]] = []
        ends = output.counts.cumsum().tolist()
        each = zip(output.rows.tolist(), output.draws.tolist(), output.positions.tolist(), strict=True)
        for i, (row, draws, position) in enumerate(each):
            text = self._known(row)
            ask = text.entry.ask
            if ask.penalized:
                count, computed = int(output.counts[i]), int(output.computed[i])
                fresh = output.token_ids[ends[i] - count + max(0, len(text.tokens) - computed) : ends[i]]
                text.tokens += fresh.tolist()
            if draws:
                found.append(self._draws(text, draws, position))
            else:
                found.append(())
        return found

    @staticmethod
    def _draws(text: _Text, draws: int, position: int) -> tuple[SampleAsk, ...]:
        ask = text.entry.ask
        if ask.penalized:
            prompt, output = text.tokens[: text.prompt], text.tokens[text.prompt :]
            ask = ask._replace(prompt=tuple(prompt), output=tuple(output))
        if ask.banned and position >= text.entry.min_tokens:
            ask = ask._replace(banned=())
        if ask.temperature > 0:
            ask = ask._replace(position=position)
        return (ask, *(ask._replace(seed=ask.seed + i) for i in range(1, draws)))

    def _known(self, row: int) -> _Text:
        text = self._texts.get(row)
        if text is None:
            raise IntegrityError("a step has a row that never entered", field="rows", got=row)
        return text
