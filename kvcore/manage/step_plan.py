"""`StepPlan`: what a step would take, worked out before anything changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvcore.errors import IntegrityError, NotBuiltError, OutOfBlocksError, RequestError
from kvcore.manage.block_hash import token_array
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix_cache import Hit
from kvcore.manage.request import RequestState
from kvcore.manage.step import ScheduledRequest, TableDelta

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


class Extension(NamedTuple):
    """What a step changed, as in `StepAllocation`."""

    deltas: dict[str, tuple[TableDelta, ...]]
    copies: tuple[tuple[int, int, int], ...]
    new_blocks: tuple[tuple[int, int], ...]


class StepPlan:
    """A step that grows by one request at a time; nothing changes before `KVCacheManager.allocate` takes it.

    What one request costs is worked out once, when it is added: a step of n requests takes n looks, however
    many of them were waiting.

    Args:
        requests: The requests that have begun.
        rules: One a group.
        pool: The blocks.
        find_hit: The longest prefix that the cache holds now.

    Attributes:
        parts: In the order of the asks.
        new_blocks: Blocks to hand out.
    """

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        rules: Sequence[GroupRule],
        pool: BlockPool,
        find_hit: Callable[[RequestState], Hit],
    ) -> None:
        self.parts: list[PlannedRequest] = []
        self.new_blocks = 0
        self._requests, self._rules, self._pool, self._find_hit = requests, rules, pool, find_hit
        self._seen: set[str] = set()
        self._revived: set[int] = set()  # free blocks that hits bring back to life: no longer to be handed out
        self._holders: dict[int, int] = {}  # of shared last blocks, as copies leave them

    @property
    def taken(self) -> int:
        """Free blocks that the step uses up."""
        return self.new_blocks + len(self._revived)

    @property
    def short(self) -> int:
        """Free blocks that are missing."""
        return max(0, self.taken - self._pool.num_free)

    def add(self, ask: ScheduledRequest) -> None:
        """Add a request, whether or not there are blocks for it.

        Raises:
            RequestError: It is unknown, asked for twice, or scheduled beyond its known tokens.
            NotBuiltError: The ask uses a feature that is not built yet.
        """
        self._count(*self._look(ask))

    def try_add(self, ask: ScheduledRequest) -> int:
        """Add a request if there are blocks for it; returns how many are missing, 0 when it was added.

        Raises:
            RequestError, NotBuiltError: As `add`.
        """
        part, new, revived = self._look(ask)
        if new or revived:  # a decode inside its block needs none
            missing = self.taken + new + len(revived) - self._pool.num_free
            if missing > 0:
                return missing
        self._count(part, new, revived)
        return 0

    def require(self, *, void: bool) -> None:
        """Refuse a step that lacks blocks, or that was worked out before blocks changed hands.

        Raises:
            IntegrityError: It is void.
            OutOfBlocksError: There are too few free blocks.
        """
        if void:
            raise IntegrityError(
                "blocks changed hands since this step was begun",
                field="step",
                got="a void step",
                remedy="call begin_step() again",
            )
        if self.short:
            raise OutOfBlocksError(
                f"the step lacks {self.short} blocks",
                field="blocks",
                got=self.taken,
                allowed=f"<= {self._pool.num_free}",
                remedy="free or preempt a request, or retire steps that are done",
            )

    def extend(self, step: int) -> Extension:
        """Take the blocks, grow the rows of all its requests by them, and say how; hits are in the rows already."""
        fresh = iter(self._pool.take(self.new_blocks))
        copies: list[tuple[int, int, int]] = []
        new_blocks: list[tuple[int, int]] = []
        deltas: dict[str, tuple[TableDelta, ...]] = {}
        for request, _, start, end, copied in self.parts:
            changes = []
            for rule, row in zip(self._rules, request.rows, strict=True):
                if rule.drops:
                    row.first = max(row.first, rule.first_block(start))
                kept_to = row.end
                if rule.index in copied:
                    shared, own = row.ids[-1], next(fresh)
                    row.ids[-1] = own
                    kept_to -= 1
                    self._pool.release((shared,), step)  # the copy reads it in this step
                    copies.append((rule.index, shared, own))
                    new_blocks.append((rule.index, own))
                for _ in range(-(-end // rule.block_size) - row.end):
                    block = next(fresh)
                    row.ids.append(block)
                    new_blocks.append((rule.index, block))
                changes.append(row.send(kept_to))
            request.computed = end
            request.in_flight += 1
            request.last_step = step
            deltas[request.request_id] = tuple(changes)
        return Extension(deltas, tuple(copies), tuple(new_blocks))

    def _look(self, ask: ScheduledRequest) -> tuple[PlannedRequest, int, set[int]]:
        """Its part, the blocks to hand out for it, and the free blocks that only its hit revives."""
        request = self._requests.get(ask.request_id)
        if request is None or ask.request_id in self._seen:
            raise RequestError(
                "unknown request" if request is None else "a request is asked for twice in one step",
                field="request_id",
                got=ask.request_id,
                remedy="call begin() first, and ask once a step",
            )
        _check_built(ask)
        hit = None if request.rows else self._find_hit(request)
        start = request.computed if hit is None else hit.tokens
        end = start + ask.num_scheduled
        _check_known(ask, request, start, end)
        new, revived, copies = 0, set[int](), []
        if hit is not None:
            for rule, blocks in zip(self._rules, hit.blocks, strict=True):
                new += -(-end // rule.block_size) - start // rule.block_size
                revived.update(b for b in blocks if self._pool.is_free(b) and b not in self._revived)
            return PlannedRequest(request, hit, start, end, ()), new, revived
        refs = self._pool.refs
        for rule, row in zip(self._rules, request.rows, strict=True):
            new += -(-end // rule.block_size) - row.held - len(row.ids)
            if start % rule.block_size and row.ids:
                last = row.ids[-1]
                # The last of several writers of a shared block keeps the block itself.
                if refs[last] > 1 and self._holders.get(last, refs[last]) > 1:
                    copies.append(rule.index)
        return PlannedRequest(request, None, start, end, tuple(copies)), new + len(copies), revived

    def _count(self, part: PlannedRequest, new: int, revived: set[int]) -> None:
        self.parts.append(part)
        self._seen.add(part.request.request_id)
        self.new_blocks += new
        if revived:
            self._revived |= revived
        for group in part.copies:
            last = part.request.rows[group].ids[-1]
            self._holders[last] = self._holders.get(last, self._pool.refs[last]) - 1


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
