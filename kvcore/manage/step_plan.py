"""`StepPlan`: what a step would take, worked out before anything changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvcore.errors import NotBuiltError, RequestError
from kvcore.manage.block_hash import token_array
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix_cache import Hit
from kvcore.manage.request import RequestState
from kvcore.manage.step import ScheduledRequest

_NOT_BUILT = ("num_lookahead", "num_external", "delay_caching", "num_encoder")


class PlannedRequest(NamedTuple):
    """One request in the step.

    Attributes:
        request: Its state.
        hit: What it is admitted with; None when it was admitted before.
        start, end: The tokens to compute.
        copies: Groups whose last block is shared and must be copied before it is written.
    """

    request: RequestState
    hit: Hit | None
    start: int
    end: int
    copies: tuple[int, ...]


class StepPlan(NamedTuple):
    """The parts of a step, and the free blocks that it needs.

    Attributes:
        parts: In the order of the asks.
        new_blocks: Blocks to hand out.
        revived: Free blocks that hits bring back to life, which no longer can be handed out.
    """

    parts: tuple[PlannedRequest, ...]
    new_blocks: int
    revived: int

    def short_of(self, free: int) -> int:
        """Free blocks that are missing when there are `free`."""
        return max(0, self.new_blocks + self.revived - free)


def plan_step(
    asks: Sequence[ScheduledRequest],
    requests: Mapping[str, RequestState],
    rules: Sequence[GroupRule],
    pool: BlockPool,
    find_hit: Callable[[RequestState], Hit],
) -> StepPlan:
    """Work out a step without changing anything.

    Raises:
        RequestError: A request is unknown, asked for twice, or scheduled beyond its known tokens.
        NotBuiltError: An ask uses a feature that is not built yet.
    """
    parts: list[PlannedRequest] = []
    seen: set[str] = set()
    new_blocks = 0
    revived: set[int] = set()
    holders: dict[int, int] = {}  # of shared last blocks, as copies leave them
    for ask in asks:
        request = requests.get(ask.request_id)
        if request is None or ask.request_id in seen:
            raise RequestError(
                "unknown request" if request is None else "a request is asked for twice in one step",
                field="request_id",
                got=ask.request_id,
                remedy="call begin() first, and ask once a step",
            )
        seen.add(ask.request_id)
        _check_built(ask)
        hit: Hit | None = None
        copies: tuple[int, ...] = ()
        start = request.computed
        if not request.rows:
            hit = find_hit(request)
            start = hit.tokens
        end = start + ask.num_scheduled
        _check_known(ask, request, start, end)
        if hit is not None:
            for rule, blocks in zip(rules, hit.blocks, strict=True):
                new_blocks += -(-end // rule.block_size) - start // rule.block_size
                revived.update(b for b in blocks if pool.refs[b] == 0 and pool.is_free(b))
        else:
            copied = []
            for rule, row in zip(rules, request.rows, strict=True):
                new_blocks += -(-end // rule.block_size) - row.held - len(row.ids)
                if start % rule.block_size and row.ids and pool.refs[row.ids[-1]] > 1:
                    last = row.ids[-1]
                    count = holders.get(last, pool.refs[last])
                    if count > 1:  # the last of several writers keeps the block itself
                        holders[last] = count - 1
                        copied.append(rule.index)
            new_blocks += len(copied)
            copies = tuple(copied)
        parts.append(PlannedRequest(request, hit, start, end, copies))
    return StepPlan(tuple(parts), new_blocks, len(revived))


def _check_built(ask: ScheduledRequest) -> None:
    if ask[2:] != (0, 0, False, 0):
        for name in _NOT_BUILT:
            if getattr(ask, name):
                raise NotBuiltError(
                    f"{name} is not built yet",
                    field=name,
                    got=getattr(ask, name),
                    allowed=0,
                    remedy=f"leave {name} out",
                )


def _check_known(ask: ScheduledRequest, request: RequestState, start: int, end: int) -> None:
    # A step in flight may still add one sampled token.
    known = len(request.tokens) + request.in_flight
    if ask.num_scheduled < 1 or end > known:
        raise RequestError(
            f"request {ask.request_id} cannot compute tokens {start} to {end}",
            field="num_scheduled",
            got=ask.num_scheduled,
            allowed=f"1 to {known - start}",
            remedy="ask lookup() for the prefix hit in the same step",
        )


def check_sampled(
    members: Sequence[tuple[RequestState, int]], new_tokens: Mapping[str, Sequence[int]]
) -> dict[str, array[int]]:
    """The sampled tokens of a step, checked before anything changes.

    Args:
        members: (request, end of its computed tokens) of the step.
        new_tokens: What the caller commits.

    Raises:
        RequestError: Tokens of a request outside the step, or too few to know what was computed.
    """
    sampled = {name: token_array(ids) for name, ids in new_tokens.items()}
    unknown = sampled.keys() - {request.request_id for request, _ in members}
    if unknown:
        raise RequestError("tokens of a request that the step did not include", field="new_tokens", got=sorted(unknown))
    for request, end in members:
        known = len(request.tokens) + len(sampled.get(request.request_id, ()))
        if request.alive and end > known:
            raise RequestError(
                f"request {request.request_id} has computed {end} tokens and knows {known}",
                field="new_tokens",
                got=request.request_id,
                remedy="commit the sampled tokens of earlier steps",
            )
    return sampled
