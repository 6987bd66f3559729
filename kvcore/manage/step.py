"""`Step`: what a step asks for, worked out before anything changes. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcore.errors import IntegrityError, OutOfBlocksError, RequestError
from kvcore.manage.allocation import TableDeltas
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.prefix.prefix_cache import Hit
from kvcore.manage.ragged import Ints
from kvcore.manage.requests import Requests, lowest

_NONE: Ints = np.zeros(0, np.int32)
_NO_CHANGE = TableDeltas(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE), _NONE.reshape(0, 3), _NONE.reshape(0, 2)


class Look(NamedTuple):
    """Requests of a step for which something changes: blocks to hand out, drop or copy.

    Attributes:
        rows, starts, ends: [m], and the tokens to compute.
        need: [m, groups], blocks to hand out, those for copies among them.
        copies: (index of the request, group) whose last block is shared and must be copied before it is written.
    """

    rows: Ints
    starts: Ints
    ends: Ints
    need: Ints
    copies: tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """Some requests of a step, the tokens to compute, their `Requests.limit`, and where something changes."""

    rows: Ints
    starts: Ints
    ends: Ints
    limits: Ints
    look: Look | None


class Entry(NamedTuple):
    """A request that the step admits."""

    row: int
    hit: Hit
    end: int
    limit: int
    need: list[int]


class Step:
    """A step that grows by requests; nothing changes before `KVCacheManager.allocate` takes it.

    What one request costs is worked out once, when it is added. Requests that need nothing cost no more than their
    share of a few array operations.

    Args:
        requests: The requests that have begun.
        pool: The blocks.
        find_hit: The longest prefix that the cache holds now for a row.
        find_whole: That of whole blocks.

    Attributes:
        needs: By group, blocks to hand out.
        entries: What it admits.
    """

    def __init__(
        self, requests: Requests, pool: BlockPool, find_hit: Callable[[int], Hit], find_whole: Callable[[int], Hit]
    ) -> None:
        self.needs = [0] * requests.groups
        self.entries: list[Entry] = []
        self._requests, self._pool = requests, pool
        self._find_hit, self._find_whole = find_hit, find_whole
        self._parts: list[Part | Entry] = []
        self._asked = np.zeros(len(requests.limit), np.bool_)
        self._size = 0
        self._revived: set[int] = set()  # free blocks that hits bring back to life: no longer to be handed out
        self._holders: dict[int, int] = {}  # of shared last blocks, as copies leave them

    @property
    def taken(self) -> int:
        """Free blocks that the step uses up."""
        return sum(self.needs) + len(self._revived)

    @property
    def short(self) -> int:
        """Free blocks, or large pages, that are missing."""
        return self._pool.missing(self.needs, self._revived)

    def add(self, rows: Ints, counts: Ints) -> None:
        """Add requests, whether or not there are blocks for them.

        Args:
            rows: Int64 [n], distinct rows of requests that are admitted.
            counts: [n], tokens to compute.

        Raises:
            RequestError: One is unknown, not admitted, asked for twice, or scheduled beyond its known tokens; none
                was added.
        """
        r = self._requests
        try:
            starts = r.computed[rows]
            limits = r.limit[rows]
        except IndexError:
            r.check(rows)
            raise
        ends = starts + counts
        if np.count_nonzero((counts < 1) | (ends > limits) | (rows < 0) | ~r.admitted[rows]):
            self._refuse(rows, counts)
        self._ask(rows)
        looked = (ends > r.quiet_to[rows]).nonzero()[0]
        look = self._look(rows[looked], starts[looked], ends[looked]) if len(looked) else None
        self._parts.append(Part(rows, starts, ends, limits, look))

    def try_add(self, row: int, count: int) -> int:
        """Add a request, admitted or not, if there are blocks for it.

        Returns:
            How many are missing; 0 when it was added.

        Raises:
            RequestError: As `add`.
        """
        r = self._requests
        r.check_one(row)
        if r.admitted[row]:
            before = list(self.needs), dict(self._holders)
            self.add(np.array([row]), np.array([count]))
            missing = self.short
            if missing and self.needs != before[0]:
                self.needs, self._holders = before
                self._parts.pop()
                self._forget(row)
                return missing
            return 0
        entry, revived = self._enter(row, count, self._find_hit(row))
        missing = self._missing(entry, revived)
        if missing and entry.hit.copied:  # a block that is copied takes the room of one that is needed
            entry, revived = self._enter(row, count, self._find_whole(row))
            missing = self._missing(entry, revived)
        if missing:
            return missing
        self._keep(entry, revived)
        return 0

    def _missing(self, entry: Entry, revived: set[int]) -> int:
        return self._pool.missing(self._with(entry.need), self._revived | revived if revived else self._revived)

    def enter(self, row: int, count: int) -> None:
        """Add a request that is not admitted yet, whether or not there are blocks for it; see `try_add`."""
        self._keep(*self._enter(row, count, self._find_hit(row)))

    def _enter(self, row: int, count: int, hit: Hit) -> tuple[Entry, set[int]]:
        """What admits the request with a hit, and the free blocks that only the hit revives."""
        r = self._requests
        end, limit = hit.tokens + count, int(r.limit[row])
        if count < 1 or end > limit or self._has(row):
            self._refuse(np.array([row]), np.array([count]))
        need = [-(-end // rule.block_size) - hit.tokens // rule.block_size for rule in r.rules]
        revived = set[int]()
        for blocks in hit.blocks:
            if blocks:
                revived.update(self._pool.free_among(np.array(blocks)).tolist())
        return Entry(row, hit, end, limit, need), revived - self._revived

    def _keep(self, entry: Entry, revived: set[int]) -> None:
        self._widen()
        self._asked[entry.row] = True
        self._size += 1
        self._parts.append(entry)
        self.entries.append(entry)
        self.needs = self._with(entry.need)
        self._revived |= revived

    def _with(self, more: Sequence[int]) -> list[int]:
        return [a + b for a, b in zip(self.needs, more, strict=True)]

    def _has(self, row: int) -> bool:
        return row < len(self._asked) and bool(self._asked[row])

    def _forget(self, row: int) -> None:
        self._asked[row] = False
        self._size -= 1

    def _widen(self) -> None:
        more = len(self._requests.limit) - len(self._asked)
        if more:  # some have begun since
            self._asked = np.concatenate((self._asked, np.zeros(more, np.bool_)))

    def _ask(self, rows: Ints) -> None:
        self._widen()
        self._asked[rows] = True
        size = self._size + len(rows)
        if np.count_nonzero(self._asked) < size:
            self._asked[:] = False
            for part in self._parts:
                self._asked[part.row if isinstance(part, Entry) else part.rows] = True
            raise RequestError(
                "a request is asked for twice in one step", field="rows", got=rows.tolist(), remedy="ask once a step"
            )
        self._size = size

    def _refuse(self, rows: Ints, counts: Ints) -> None:
        """Say what is wrong with the first request that cannot be added."""
        r = self._requests
        r.check(rows)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            start = int(r.computed[row]) if r.admitted[row] else self._find_hit(row).tokens
            if self._has(row):
                raise RequestError("a request is asked for twice in one step", field="row", got=row)
            if count < 1 or start + count > r.limit[row]:
                raise RequestError(
                    f"request {r.name(row)} cannot compute tokens {start} to {start + count}",
                    field="counts",
                    got=count,
                    allowed=f"1 to {int(r.limit[row]) - start}",
                    remedy="ask lookup() for the prefix hit in the same step",
                )
            if not r.admitted[row]:
                raise RequestError(
                    f"request {r.name(row)} is not admitted", field="rows", got=row, remedy="add it by try_add()"
                )

    def _look(self, rows: Ints, starts: Ints, ends: Ints) -> Look:
        r = self._requests
        need = -(-ends[:, None] // r.sizes) - r.end.take(rows, axis=0)
        copies: list[tuple[int, int]] = []
        for i in r.shared[rows].nonzero()[0].tolist():
            r.shared[rows[i]] = False  # unless it turns out to be
            for group in range(r.groups):
                blocks = r.blocks.view(int(rows[i]) * r.groups + group)
                if starts[i] % r.sizes[group] and len(blocks):
                    last = int(blocks[-1])
                    if self._pool.refs[last] > 1:
                        r.shared[rows[i]] = True
                    # The last of several writers of a shared block keeps the block itself.
                    holders = self._holders.get(last, int(self._pool.refs[last]))
                    if holders > 1:
                        self._holders[last] = holders - 1
                        need[i, group] += 1
                        copies.append((i, group))
        self.needs = self._with(need.sum(axis=0).tolist())
        return Look(rows, starts, ends, need, tuple(copies))

    def fits_together(self, row: int) -> bool:
        """Whether the blocks of a request, and those that the step asks for, would fit if they lay together."""
        r = self._requests
        held = r.blocks.size[r.flat(np.array([row]))].tolist()
        return self._pool.fits_together(self._with(held))

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
                f"the step lacks {self.short} {self._pool.unit}",
                field="blocks",
                got=self.taken,
                allowed=f"what {self._pool.num_free} free {self._pool.unit} hold",
                remedy="free or preempt a request, or retire steps that are done",
            )

    def extend(self, look: Look | None, step: int) -> tuple[TableDeltas, Ints, Ints]:
        """Take the blocks, grow the rows by them, and say how; hits are in the rows already."""
        if look is None:
            return _NO_CHANGE
        r = self._requests
        rows, starts, _, need, copied = look
        flat, counts = r.flat(rows), need.ravel()
        groups = np.zeros(len(rows), np.int64) if r.groups == 1 else np.arange(len(flat)) % r.groups
        wanted = np.repeat(groups, counts)
        ids = self._pool.take(wanted)
        new_blocks = _columns(wanted, ids)
        kept_to, copies = r.end.take(rows, axis=0), _NONE.reshape(0, 3)
        if copied:
            at = np.array([i * r.groups + group for i, group in copied])
            place = counts.cumsum()[at] - counts[at]
            last = r.blocks.start[flat[at]] + r.blocks.size[flat[at]] - 1
            shared, own = r.blocks.data[last], ids[place]
            r.blocks.data[last] = own
            self._pool.release(shared, step)  # the copy reads it in this step
            copies = _columns(groups[at], shared, own)
            ids, counts = np.delete(ids, place), counts.copy()
            counts[at] -= 1
            kept_to.ravel()[at] -= 1
        r.blocks.extend(flat, counts, ids)
        end = r.end.take(rows, axis=0) + counts.reshape(need.shape)
        before = first = r.first.take(rows, axis=0)
        quiet = lowest(end * r.sizes)
        if r.dropping:
            first = np.maximum(first, r.first_blocks(starts))
            r.first[rows] = first
            np.minimum(quiet, r.drop_positions(first) + 1, out=quiet)
        r.end[rows] = end
        shared_now = r.shared[rows]
        r.quiet_to[rows] = np.where(shared_now, 0, quiet) if np.count_nonzero(shared_now) else quiet
        entering = r.entering[rows]
        if np.count_nonzero(entering):  # the worker has nothing yet
            before, kept_to = np.where(entering[:, None], 0, before), np.where(entering[:, None], first, kept_to)
            r.entering[rows] = False
        elif not copied:
            new = counts
            told = (new > 0).nonzero()[0] if first is before else ((first > before).ravel() | (new > 0)).nonzero()[0]
            return self._deltas(rows, groups, first - before, kept_to - first, new, told, ids), copies, new_blocks
        drops, new = first - before, (end - kept_to).ravel()
        told = (drops.ravel().astype(np.bool_) | (new > 0)).nonzero()[0]
        sent = r.blocks.gather(flat[told], (kept_to - r.held(rows)).ravel()[told], new[told])
        return self._deltas(rows, groups, drops, kept_to - first, new, told, sent), copies, new_blocks

    def _deltas(
        self, rows: Ints, groups: Ints, drops: Ints, keeps: Ints, new: Ints, told: Ints, ids: Ints
    ) -> TableDeltas:
        numbers = np.empty((5, len(groups)), np.int32)
        numbers[0] = rows if self._requests.groups == 1 else rows.repeat(self._requests.groups)
        numbers[1], numbers[2], numbers[3], numbers[4] = groups, drops.ravel(), keeps.ravel(), new
        if len(told) < len(groups):
            numbers = numbers[:, told]
        return TableDeltas(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], ids)

    def whole(self) -> Part:
        """All its requests, in the order in which they were added."""
        parts: list[Part] = []
        entries: list[Entry] = []
        for part in (*self._parts, None):
            if isinstance(part, Entry):
                entries.append(part)
                continue
            if entries:
                parts.append(_as_part(entries))
                entries = []
            if part is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else _join(parts)


def _columns(*columns: Ints) -> Ints:
    table = np.empty((len(columns[0]), len(columns)), np.int32)
    for i, column in enumerate(columns):
        table[:, i] = column
    return table


def _as_part(entries: Sequence[Entry]) -> Part:
    numbers = np.array([(e.row, e.hit.tokens, e.end, e.limit) for e in entries], np.int64).reshape(-1, 4)
    rows, starts, ends, limits = np.ascontiguousarray(numbers.T)
    copies = tuple((i, group) for i, entry in enumerate(entries) for group in entry.hit.copied)
    need = np.array([e.need for e in entries], np.int64)
    return Part(rows, starts, ends, limits, Look(rows, starts, ends, need, copies))


def _join(parts: Sequence[Part]) -> Part:
    numbers = [np.zeros((4, 0), np.int64), *(np.stack((p.rows, p.starts, p.ends, p.limits)) for p in parts)]
    rows, starts, ends, limits = np.concatenate(numbers, axis=1)
    looks = [part.look for part in parts if part.look is not None]
    if not looks:
        return Part(rows, starts, ends, limits, None)
    copies, before = [], 0
    for look in looks:
        copies += [(i + before, group) for i, group in look.copies]
        before += len(look.rows)
    look_rows, look_starts, look_ends = np.concatenate([np.stack((x.rows, x.starts, x.ends)) for x in looks], axis=1)
    need = np.concatenate([look.need for look in looks])
    return Part(rows, starts, ends, limits, Look(look_rows, look_starts, look_ends, need, tuple(copies)))
