"""What a step asks for and what it gets: integers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class ScheduledRequest(NamedTuple):
    """One request's part of a step.

    Attributes:
        request_id: A request that has begun.
        num_scheduled: Tokens to compute in this step, those of a prefix hit not among them.
        num_lookahead, num_external, delay_caching, num_encoder: Room for speculative tokens, tokens
            computed elsewhere, caching left to the caller, and encoder tokens; not built yet.
    """

    request_id: str
    num_scheduled: int
    num_lookahead: int = 0
    num_external: int = 0
    delay_caching: bool = False
    num_encoder: int = 0


class TableDelta(NamedTuple):
    """How the row of one request in one group changes.

    ::

        row = row[drop_front:][:keep] + ids
        first_block = first_block + drop_front

    The row of a request that enters (by admission or by fork) starts as empty, with first_block 0.

    Attributes:
        drop_front: Entries that fall out at the front; may exceed the length of the row.
        keep: Entries kept after that; those behind them are replaced.
        ids: New entries at the end.
    """

    drop_front: int
    keep: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class StepAllocation:
    """The blocks of one step.

    Attributes:
        step: Number of the step, from 1.
        deltas: Per request of the step, one delta a group.
        copies: (group, from block, to block), to be done before the model runs.
        new_blocks: (group, block) handed out in this step; their old content is of no use.
        cached_tokens: Per request admitted in this step, the tokens that the prefix cache gave it.
        dead: (group that wrote it, block) whose content died since the step before, where the manager tracks
            that; a block may be dead and new in one step.
    """

    step: int
    deltas: Mapping[str, tuple[TableDelta, ...]]
    copies: tuple[tuple[int, int, int], ...]
    new_blocks: tuple[tuple[int, int], ...]
    cached_tokens: Mapping[str, int]
    dead: tuple[tuple[int, int], ...] = ()
