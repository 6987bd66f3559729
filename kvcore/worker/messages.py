"""What scheduler and workers tell each other: integers and names, never a tensor, never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from kvcore.manage.step import TableDelta

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
        prompt, output: Tokens so far, where a penalty is on; on the wire only with the first draw after each admission,
            for the worker keeps them and adds those that it computes.
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


class ScheduledRow(NamedTuple):
    """One request's part of a step.

    Attributes:
        request_id: The request.
        token_ids: Tokens to compute, in order.
        num_computed: Tokens of the request that are in the cache already.
        deltas: How its block-table row changes, one for each KV group.
        samples: Tokens to draw after this step; empty in the middle of a prefill.
        keep_logits: Whether the logits of every position are wanted (scoring, inline only).
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_computed: int
    deltas: tuple[TableDelta, ...]
    samples: tuple[SampleAsk, ...] = ()
    keep_logits: bool = False


@dataclass(frozen=True)
class SchedulerOutput:
    """One step of work for every worker.

    Attributes:
        step: Number of the step, from 1.
        rows: The requests, those with one token and a cached prefix (decodes) first.
        finished: Requests whose rows can be dropped, before `rows` are applied.
        copies: (group, from, to) block copies, done before the model runs.
        new_blocks: (group, block) handed out in this step, zeroed where the policy says so.
        dead: (group, block) whose content died since the step before; poisoned where that is switched on.
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    finished: tuple[str, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    new_blocks: tuple[tuple[int, int], ...] = ()
    dead: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(len(r.token_ids) for r in self.rows)

    def to_bytes(self) -> bytes:
        """This message as msgpack."""
        rows = [
            (
                r.request_id,
                r.token_ids,
                r.num_computed,
                [tuple(_flat(d)) for d in r.deltas],
                [tuple(s) for s in r.samples],
                r.keep_logits,
            )
            for r in self.rows
        ]
        packed: bytes = msgpack.packb((self.step, rows, self.finished, self.copies, self.new_blocks, self.dead))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> SchedulerOutput:
        """The message that `to_bytes` packed."""
        step, rows, finished, copies, new_blocks, dead = msgpack.unpackb(data, use_list=False)
        return cls(
            step=step,
            rows=tuple(
                ScheduledRow(
                    name,
                    tokens,
                    computed,
                    tuple(TableDelta(*d) for d in deltas),
                    tuple(SampleAsk(*s) for s in samples),
                    keep,
                )
                for name, tokens, computed, deltas, samples, keep in rows
            ),
            finished=finished,
            copies=copies,
            new_blocks=new_blocks,
            dead=dead,
        )


def _flat(delta: TableDelta) -> tuple[int, int, tuple[int, ...]]:
    return delta.drop_front, delta.keep, delta.ids


# Token ids with their log-probabilities under the model's own logits: the chosen token, then the likeliest ones.
Logprobs = tuple[tuple[int, float], ...]


class NotFinite(NamedTuple):
    """A row of a step whose logits hold NaN or infinity.

    Attributes:
        row: Index of the row.
        where: The first place that was not finite, in words.
    """

    row: int
    where: str


@dataclass(frozen=True)
class StepResult:
    """What a step produced.

    Attributes:
        step: Number of the step.
        tokens: For each row of the step, one token id for each of its samples; none where it is not finite.
        not_finite: Rows whose logits were not finite.
        logprobs: By row that asked for them, those of each sample.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    not_finite: tuple[NotFinite, ...] = ()
    logprobs: Mapping[int, tuple[Logprobs, ...]] = field(default_factory=dict)
