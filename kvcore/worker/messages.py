"""What scheduler and workers tell each other: arrays of integers and a few names, never a tensor, never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from kvcore.manage.allocation import TableDeltas
from kvcore.manage.ragged import Ints

NOTHING = -1  # in place of a token id: there is none that could be drawn
NO_TOKEN = "every token that may come now has minus infinity"  # said of such a row


class SampleAsk(NamedTuple):
    """One token to draw from a row's last logits.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k: Filters; 1.0 and 0 are off.
        seed: Seed of the sample.
        position: How many tokens the sample already has; with the seed it names the random number, so
            that a preempted request draws the same tokens again.
        min_p: Filter; 0.0 is off.
        repetition, presence, frequency: Penalties; 1.0, 0.0 and 0.0 are off.
        prompt, output: Tokens so far, where a penalty is on; on the wire only when the request enters, for the worker
            keeps them and adds those that it computes.
        banned: Ids that may not come yet.
        logprobs: How many likeliest tokens to tell beside the chosen one; None for no log-probabilities.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the logits themselves change before a token is chosen."""
        return bool(self.penalized or self.banned)

    @property
    def penalized(self) -> bool:
        """Whether a penalty is on."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


class Entry(NamedTuple):
    """A request whose row begins with this step, by admission or by fork: what stays the same in all its steps.

    Attributes:
        row: Its row.
        request_id: Its name.
        ask: What its draws have in common; `position` is 0, `banned` what may not come early.
        min_tokens: How many tokens are early.
        keep_logits: Whether the logits of every position are wanted (scoring, inline only).
    """

    row: int
    request_id: str
    ask: SampleAsk
    min_tokens: int = 0
    keep_logits: bool = False


_NONE: Ints = np.zeros(0, np.int32)
_PAIRS, _TRIPLES = _NONE.reshape(0, 2), _NONE.reshape(0, 3)
_NO_DELTAS = TableDeltas(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


class SchedulerOutput(NamedTuple):
    """One step of work for every worker. Arrays are int32; those by request are in one order, decodes first.

    Attributes:
        step: Number of the step, from 1.
        rows: [n] the requests.
        counts: [n] tokens to compute of each.
        computed: [n] tokens of each that are in the cache already.
        draws: [n] tokens to draw after this step: 0 in the middle of a prefill, several where samples part.
        positions: [n] tokens that were generated before.
        token_ids: [sum of counts] the tokens to compute, one request after the other.
        deltas: How block tables change.
        left: Rows whose requests ended, before any of the others is applied.
        entries: The requests whose rows begin.
        copies: [c, 3] (group, from, to) block copies, done before the model runs.
        new_blocks: [b, 2] (group, block) handed out in this step, zeroed where the policy says so.
        dead: [d, 2] (group, block) whose content died since the step before; poisoned where that is switched on.
        freed: [f, 2] (group, block) that lost their last holder since the step before, where the sanitizer is on.
    """

    step: int
    rows: Ints = _NONE
    counts: Ints = _NONE
    computed: Ints = _NONE
    draws: Ints = _NONE
    positions: Ints = _NONE
    token_ids: Ints = _NONE
    deltas: TableDeltas = _NO_DELTAS
    left: Ints = _NONE
    entries: tuple[Entry, ...] = ()
    copies: Ints = _TRIPLES
    new_blocks: Ints = _PAIRS
    dead: Ints = _PAIRS
    freed: Ints = _PAIRS

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids)

    def to_bytes(self) -> bytes:
        """This message as msgpack; arrays travel as their bytes, little endian."""
        parts: list[Any] = []
        for value in self:
            if isinstance(value, TableDeltas):
                parts.append([_as_bytes(array) for array in value])
            else:
                parts.append(_as_bytes(value) if isinstance(value, np.ndarray) else value)
        packed: bytes = msgpack.packb(parts)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> SchedulerOutput:
        """The message that `to_bytes` packed."""
        parts = dict(zip(cls._fields, msgpack.unpackb(data, use_list=False), strict=True))
        for name, value in parts.items():
            if isinstance(value, bytes):
                parts[name] = _from_bytes(value).reshape(-1, _WIDTHS[name]) if name in _WIDTHS else _from_bytes(value)
        parts["deltas"] = TableDeltas(*map(_from_bytes, parts["deltas"]))
        parts["entries"] = tuple(
            Entry(row, name, SampleAsk(*ask), early, keep) for row, name, ask, early, keep in parts["entries"]
        )
        return cls(**parts)


_WIDTHS = {"copies": 3, "new_blocks": 2, "dead": 2, "freed": 2}


def _as_bytes(array: Ints) -> bytes:
    return array.astype("<i4", copy=False).tobytes()


def _from_bytes(data: bytes) -> Ints:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


# Token ids with their log-probabilities under the model's own logits: the chosen token, then the likeliest ones.
Logprobs = tuple[tuple[int, float], ...]


class NotFinite(NamedTuple):
    """A row of a step whose logits hold NaN or infinity.

    Attributes:
        row: Index of the row in the step.
        where: The first place that was not finite, in words.
    """

    row: int
    where: str


@dataclass(frozen=True)
class StepResult:
    """What a step produced.

    Attributes:
        step: Number of the step.
        tokens: Int64 [sum of draws], the drawn token ids, one request after the other; `NOTHING` where the logits
            are not finite.
        not_finite: Rows whose logits were not finite.
        logprobs: By index of a row that asked for them, those of each sample.
    """

    step: int
    tokens: Ints
    not_finite: tuple[NotFinite, ...] = ()
    logprobs: Mapping[int, tuple[Logprobs, ...]] = field(default_factory=dict)
