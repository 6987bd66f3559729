"""`Requests`: what the manager keeps of its requests, one row each, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcore.errors import RequestError
from kvcore.manage.allocation import TableDeltas
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix.block_hash import TOKEN_TYPE, Adapter, Chain, Extra
from kvcore.manage.ragged import Ints, Ragged, spans

NEVER = 1 << 62  # a position that no sequence reaches


def lowest(by_group: Ints) -> Ints:
    """[n]: the least of each row of [n, groups]."""
    # Numpy reduces a few long rows much faster than many short ones.
    found: Ints = np.ascontiguousarray(by_group.T).min(axis=0) if by_group.shape[1] > 1 else by_group.ravel()
    return found


_BY_ROW = ("known", "limit", "computed", "committed", "last_step", "epoch", "hashed", "quiet_to", "settled_to")
_BY_GROUP = ("first", "end", "offered")
_FLAGS = ("admitted", "entering", "shared")


class Origin(NamedTuple):
    """What a request was begun with, beside its tokens."""

    name: str
    prompt_tokens: int
    salt: str
    extras: tuple[Extra, ...]

    @property
    def adapters(self) -> tuple[bytes, ...]:
        """Digests of its adapters, in order."""
        return tuple(sorted(e.digest for e in self.extras if isinstance(e, Adapter)))


class Requests:
    """Every request from `begin` to `free` under a number, its row; a row that is free serves the next request.

    The blocks of row r in group g are row ``r * groups + g`` of `blocks`, from index `held` on::

        index      held        first             end
                    |            |                |
        blocks   [ 31  |  8  |  37  |  12  |  44 ]
                   not yet       what the worker
                   committed     has in its table

    A block leaves the table in the step that no longer reads it, but stays held until the step that wrote
    it is committed, so that its content can still enter the prefix cache.

    Args:
        rules: One a group.

    Attributes:
        tokens: Known token ids: the prompt, and what was sampled and committed.
        blocks: Blocks held, by row and group.
        chains, origins: By row; None where it is free.
        known: Tokens known; `limit` is that many and one for each step in flight, or -1 where the row is free.
        computed: Tokens given to steps so far, whether or not those are committed.
        committed: Tokens whose content is computed for sure.
        last_step: The last step that may read its blocks.
        epoch: Of the prefix cache when it was admitted; a reset keeps what ran before it out of the index.
        hashed: Digests of its chain.
        quiet_to: A step that ends there or before needs no block, drops none and copies none.
        settled_to: A commit that ends there or before fills no block and drops none.
        first, end, offered: By row and group: the first block of the table, one past the last block, and the
            block below which all were offered to the prefix cache.
        admitted: Whether it has blocks.
        entering: Whether the worker has no row of it yet.
        shared: Whether a last block of it may have another holder.
    """

    known: Ints
    limit: Ints
    computed: Ints
    committed: Ints
    last_step: Ints
    epoch: Ints
    hashed: Ints
    quiet_to: Ints
    settled_to: Ints
    first: Ints
    end: Ints
    offered: Ints
    admitted: Ints
    entering: Ints
    shared: Ints

    def __init__(self, rules: Sequence[GroupRule]) -> None:
        self.rules = rules
        self.groups = len(rules)
        self.sizes: Ints = np.array([r.block_size for r in rules], np.int64)
        self.stores = np.array([not r.stores_nothing for r in rules])
        self.some_store_nothing = not self.stores.all()
        self.dropping = [r for r in rules if r.drops]
        self.tokens = Ragged(TOKEN_TYPE)
        self.blocks = Ragged(np.int32)
        self.chains: list[Chain | None] = []
        self.origins: list[Origin | None] = []
        self._spare: list[int] = []
        # What is called by a name is a row of one of these, so that a request is cleared and copied at once.
        self._fields = np.zeros((len(_BY_ROW), 0), np.int64)
        self._by_group = np.zeros((len(_BY_GROUP), 0, self.groups), np.int64)
        self._flags = np.zeros((len(_FLAGS), 0), np.bool_)
        self._name_them()

    def __len__(self) -> int:
        """Requests that have begun and were not freed."""
        return len(self.origins) - len(self._spare)

    def rows(self) -> list[int]:
        """Their rows."""
        return [row for row, origin in enumerate(self.origins) if origin is not None]

    def open(self, origin: Origin, chain: Chain, tokens: Ints) -> int:
        """A row for a new request."""
        if not self._spare:
            self._widen()
        row = self._spare.pop()
        self.tokens.assign(row, tokens)
        self.origins[row], self.chains[row] = origin, chain
        self.known[row] = self.limit[row] = len(tokens)
        return row

    def close(self, rows: Ints) -> None:
        """Give rows away; their blocks were taken out before."""
        self.tokens.clear(rows)
        self.blocks.clear(self.flat(rows))
        for fields in (self._fields, self._by_group, self._flags):
            fields[:, rows] = 0
        self.limit[rows] = -1
        for row in rows.tolist():
            self.origins[row] = self.chains[row] = None
            self._spare.append(row)

    def chain(self, row: int) -> Chain:
        """The digests of a request that has begun."""
        found = self.chains[row]
        if found is None:
            raise RequestError("unknown request", field="row", got=row)
        return found

    def chains_of(self, rows: Ints) -> list[Chain]:
        """`chain` of each of these rows."""
        return list(map(self.chains.__getitem__, rows.tolist()))  # type: ignore[arg-type]  # none of them is free

    def origin(self, row: int) -> Origin:
        """What a request that has begun came with."""
        found = self.origins[row]
        if found is None:
            raise RequestError("unknown request", field="row", got=row)
        return found

    def copy(self, row: int, name: str) -> int:
        """A row with the same tokens, blocks and progress, that the worker does not know yet."""
        origin = self.origin(row)._replace(name=name)
        twin = self.open(origin, self.chain(row).copy(), self.tokens.view(row).copy())
        for fields in (self._fields, self._by_group, self._flags):
            fields[:, twin] = fields[:, row]
        for group in range(self.groups):
            self.blocks.assign(twin * self.groups + group, self.blocks.view(row * self.groups + group).copy())
        self.entering[twin] = True
        return twin

    def check(self, rows: Ints) -> None:
        """Raise `RequestError` unless these are rows of requests, each once."""
        numbers = rows.tolist()
        for row in numbers:
            self.check_one(row)
        if len(set(numbers)) < len(numbers):
            raise RequestError("a request is named twice", field="rows", got=numbers)

    def check_one(self, row: int) -> None:
        """Raise `RequestError` unless this is the row of a request."""
        if not 0 <= row < len(self.origins) or self.origins[row] is None:
            raise RequestError("unknown request", field="row", got=row, remedy="call begin() first")

    def check_sampled(self, members: Ints, ends: Ints, rows: Ints, tokens: Ints) -> tuple[Ints, bool]:
        """How many tokens each member of a step will know, and whether each gets one.

        Raises:
            RequestError: See `KVCacheManager.commit`.
        """
        known = self.known[members]
        everyone = len(rows) == len(members) and not np.count_nonzero(rows != members)
        if everyone:
            known = known + 1
        else:
            named = np.zeros(len(self.limit), np.bool_)
            named[rows[(rows >= 0) & (rows < len(named))]] = True
            got = named[members]
            if np.count_nonzero(got) != len(rows):
                outside = [row for row in rows.tolist() if row not in set(members.tolist())]
                raise RequestError(
                    "tokens of a request that the step did not include, or twice of one",
                    field="rows",
                    got=outside or rows.tolist(),
                )
            known = known + got
        if np.count_nonzero(tokens >> 32):
            raise RequestError(
                "token ids must be integers of 32 bits", field="tokens", got=tokens.tolist(), allowed="0 .. 2**32 - 1"
            )
        unknown = (ends > known).nonzero()[0]
        if len(unknown):
            i = int(unknown[0])
            name = self.name(int(members[i]))
            raise RequestError(
                f"request {name} has computed {ends[i]} tokens and knows {known[i]}",
                field="tokens",
                got=name,
                remedy="commit the sampled tokens of earlier steps",
            )
        return known, everyone

    def name(self, row: int) -> str:
        """What people call a request."""
        origin = self.origins[row] if 0 <= row < len(self.origins) else None
        return (origin.name if origin is not None else "") or f"of row {row}"

    def flat(self, rows: Ints) -> Ints:
        """The rows of `blocks` of these requests, by request, then group."""
        if self.groups == 1:
            return rows
        each: Ints = (rows[:, None] * self.groups + np.arange(self.groups)).ravel()
        return each

    def held(self, rows: Ints) -> Ints:
        """[n, groups]: index of the first block held."""
        if not self.dropping:
            return np.zeros((len(rows), self.groups), np.int64)
        found: Ints = self.end.take(rows, axis=0) - self.blocks.size.reshape(-1, self.groups).take(rows, axis=0)
        return found

    def first_blocks(self, positions: Ints) -> Ints:
        """[n, groups]: index of the first block that a query at each position, or a later one, may read."""
        found = np.zeros((len(positions), self.groups), np.int64)
        for rule in self.dropping:
            found[:, rule.index] = rule.first_blocks(positions)
        return found

    def next_full(self, rows: Ints) -> Ints:
        """[n]: a position up to which no block becomes full that others could find."""
        full = (self.offered.take(rows, axis=0) + 1) * self.sizes - 1
        if self.some_store_nothing:
            full = np.where(self.stores, full, NEVER)
        return lowest(full)

    def take_unread(self, rows: Ints) -> tuple[Ints, Ints]:
        """Take out what no query from the committed end on will read; returns the blocks and the row of each."""
        keep, flat = self.first_blocks(self.committed[rows]), self.flat(rows)
        gone = np.maximum(keep - self.held(rows), 0)
        idle = self.limit[rows] == self.known[rows]
        for group in (~self.stores).nonzero()[0].tolist():  # a begun block holds nothing that is read again
            gone[idle, group] = self.blocks.size[rows[idle] * self.groups + group]
            self.end[rows[idle], group] = keep[idle, group]
        return self.blocks.drop_front(flat, gone.ravel()), np.repeat(rows.repeat(self.groups), gone.ravel())

    def give_up(self, rows: Ints) -> TableDeltas:
        """What the worker's tables of these requests, which are in no step now, still name and they do not hold."""
        held, before, flat = self.held(rows), self.first[rows], self.flat(rows)
        first = np.maximum(before, held)
        self.first[rows] = first
        groups = np.tile(np.arange(self.groups), len(rows))
        none = np.zeros_like(flat)
        keeps = np.maximum(self.end[rows] - first, 0)
        drops = (first - before).ravel()
        told = np.array((rows.repeat(self.groups), groups, drops, keeps.ravel(), none), np.int32)
        return TableDeltas(told[0], told[1], told[2], told[3], told[4], told[0, :0])

    def take_all(self, rows: Ints) -> tuple[Ints, Ints]:
        """Take out all blocks of these requests, one request after the other; returns them and the row of each.

        Each gives up its blocks by the tokens where they end, the last first, over all groups: in this order it
        loses its prefix from the tail, in every group alike.
        """
        flat = self.flat(rows)
        counts = self.blocks.size[flat]
        blocks = self.blocks.drop_front(flat, counts)
        owners = rows.repeat(self.groups).repeat(counts)
        if self.groups > 1:
            place = np.arange(len(rows)).repeat(self.groups).repeat(counts)
            ends, sizes = self.end.take(rows, axis=0).ravel(), np.tile(self.sizes, len(rows))
            last = np.repeat(ends * sizes, counts) - spans(np.zeros_like(counts), counts) * np.repeat(sizes, counts)
            order = np.lexsort((-last, place))
            blocks, owners = blocks[order], owners[order]
        return blocks, owners

    def table(self, row: int, group: int) -> tuple[int, list[int]]:
        """(first_block, ids) as the worker has them after the next step, (0, []) before admission."""
        if not self.admitted[row]:
            return 0, []
        held = int(self.held(np.array([row]))[0, group])
        first = max(int(self.first[row, group]), held)
        return first, self.blocks.view(row * self.groups + group)[first - held :].tolist()

    def drop_positions(self, blocks: Ints) -> Ints:
        """[n]: a position up to which no group drops more than what lies before these block indices [n, groups]."""
        least = np.full(len(blocks), NEVER)
        for rule in self.dropping:
            np.minimum(least, rule.drop_positions(blocks[:, rule.index]), out=least)
        return least

    def _widen(self) -> None:
        old = len(self.origins)
        rows = max(64, 2 * old)
        self._fields = _wider(self._fields, rows)
        self._by_group = _wider(self._by_group, rows)
        self._flags = _wider(self._flags, rows)
        self._name_them()
        self.limit[old:] = -1
        self.tokens.widen(rows)
        self.blocks.widen(rows * self.groups)
        self.origins += [None] * (rows - old)
        self.chains += [None] * (rows - old)
        self._spare += range(rows - 1, old - 1, -1)

    def _name_them(self) -> None:
        for names, fields in ((_BY_ROW, self._fields), (_BY_GROUP, self._by_group), (_FLAGS, self._flags)):
            for name, field in zip(names, fields, strict=True):
                setattr(self, name, field)


def _wider(fields: Ints, rows: int) -> Ints:
    wide = np.zeros((len(fields), rows, *fields.shape[2:]), fields.dtype)
    wide[:, : fields.shape[1]] = fields
    return wide
