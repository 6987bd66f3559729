"""`PrefixCache`: the index (group, digest) -> block, and the longest prefix that every group can serve."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.group_rule import GroupRule, hash_block_size, hit_unit
from kvcore.manage.prefix.siblings import Beginnings
from kvcore.manage.ragged import Ints


class Hit(NamedTuple):
    """A prefix that can be attached.

    Attributes:
        tokens: Its length n, a multiple of the lcm of the block sizes, or with partial reuse any length.
        first_blocks: Per group, index of the first block that it needs.
        blocks: Per group, the ids that cover ``[first_needed(n), n)``.
        copied: Groups whose last block serves only up to n, and is copied before the rest of it is written.
    """

    tokens: int
    first_blocks: tuple[int, ...]
    blocks: tuple[list[int], ...]
    copied: tuple[int, ...] = ()


class PrefixCache:
    """Where committed blocks are found again.

    Args:
        rules: The groups.
        num_blocks: Block ids, the null block included.
    """

    def __init__(self, rules: Sequence[GroupRule], num_blocks: int) -> None:
        self._rules = rules
        self.unit = hit_unit(rules)
        size = hash_block_size(rules)
        # Digests a block, per group: block b of a group ends where digest (b + 1) * span - 1 ends.
        self.spans = tuple(r.block_size // size for r in rules)
        self._index: tuple[dict[bytes, int], ...] = tuple({} for _ in rules)
        self._digest: list[bytes | None] = [None] * num_blocks
        self._group = np.zeros(num_blocks, np.uint8)

    def __len__(self) -> int:
        """Blocks that can be hit."""
        return sum(map(len, self._index))

    def get(self, group: int, digest: bytes) -> int | None:
        """The block of `group` found by `digest`."""
        return self._index[group].get(digest)

    def known(self, digests: Sequence[bytes], counts: Sequence[int]) -> Ints:
        """The blocks found by a chain: of group g those among its first ``counts[g]`` blocks."""
        chains = zip(self._index, self.spans, counts, strict=True)
        found = [index.get(digests[(b + 1) * span - 1]) for index, span, count in chains for b in range(count)]
        return np.array([block for block in found if block is not None], np.int64)

    def insert(self, group: int, digests: Sequence[bytes], blocks: Sequence[int]) -> Ints:
        """Make committed blocks known, which are not yet; returns those that no other block made superfluous."""
        holders = list(map(self._index[group].setdefault, digests, blocks))
        if holders != blocks:
            pairs = [(d, b) for d, b, holder in zip(digests, blocks, holders, strict=True) if holder == b]
            digests, blocks = [d for d, _ in pairs], [b for _, b in pairs]
        deque(map(self._digest.__setitem__, blocks, digests), maxlen=0)  # without a loop in Python
        stored = np.array(blocks, np.int64)
        self._group[stored] = group
        return stored

    def remove(self, blocks: Sequence[int]) -> list[tuple[int, bytes]]:
        """Forget blocks; returns the group and the digest that each was found by."""
        found = []
        for block, group in zip(blocks, self._group[blocks].tolist(), strict=True):
            digest = self._digest[block]
            if digest is None or self._index[group].pop(digest, None) != block:
                raise IntegrityError("a block that is not in the index is evicted", field="block", got=block)
            self._digest[block] = None
            found.append((group, digest))
        return found

    def clear(self) -> Ints:
        """Forget everything; returns the blocks that were known."""
        blocks = [b for index in self._index for b in index.values()]
        for index in self._index:
            index.clear()
        for block in blocks:
            self._digest[block] = None
        return np.array(blocks, np.int64)

    def entries(self) -> list[tuple[int, bytes, int]]:
        """All (group, digest, block); for proofs and tests."""
        return [(g, digest, block) for g, index in enumerate(self._index) for digest, block in index.items()]

    def longest(self, digests: Sequence[bytes], limit: int) -> int:
        """Tokens of the longest prefix of at most `limit` tokens that every group can serve."""
        return self.find(digests, limit).tokens

    def find(self, digests: Sequence[bytes], limit: int, beginnings: Beginnings | None = None) -> Hit:
        """The longest prefix of at most `limit` tokens that every group can serve, with its blocks; changes nothing.

        Groups that keep everything bound the length from above. The others then need only the blocks
        that a query behind the prefix still reads; whenever one of them cannot serve a length, the next
        shorter candidate is asked of all again, until they agree.

        Args:
            digests: Of the text, as far as `limit` at least.
            limit: Tokens that may be reused.
            beginnings: What its blocks share with cached ones; without it a hit ends where blocks of all groups end.
        """
        unit = self.unit if beginnings is None else 1
        length = limit // unit * unit
        leading: dict[int, list[int]] = {}
        for rule in self._rules:
            if not rule.drops:
                found = leading[rule.index] = self._leading(rule, digests, length)
                reach = len(found) * rule.block_size
                if beginnings is not None and reach < length:
                    reach += beginnings.of(rule.index, len(found)).tokens
                length = min(length, reach // unit * unit)
        dropping = [r for r in self._rules if r.drops]
        while length:
            # The first group that falls short, if any.
            tails = (self._tail(r, digests, length, beginnings) for r in dropping)
            served = next((n for n in tails if n < length), length)
            if served == length:
                break
            length = served
        firsts, rows, copied = [], [], []
        for rule, index, span in zip(self._rules, self._index, self.spans, strict=True):
            first, end = rule.first_block(length), length // rule.block_size
            firsts.append(first)
            if rule.drops:
                blocks = [index[digest] for digest in digests[(first + 1) * span - 1 : end * span : span]]
            else:
                blocks = leading[rule.index][:end]
            if beginnings is not None and length % rule.block_size and rule.reads_before(length):
                blocks.append(beginnings.of(rule.index, end).block)
                copied.append(rule.index)
            rows.append(blocks)
        return Hit(length, tuple(firsts), tuple(rows), tuple(copied))

    def _tail(self, rule: GroupRule, digests: Sequence[bytes], length: int, beginnings: Beginnings | None) -> int:
        """The longest prefix of at most `length` tokens, in hit units, that this group can serve."""
        index, span, size = self._index[rule.index], self.spans[rule.index], rule.block_size
        while length:
            block = length // size
            if beginnings is not None and length % size:
                common = min(length, block * size + beginnings.of(rule.index, block).tokens)
                length = rule.last_unread(length, common)
            missing = length // size - 1
            first = rule.first_block(length)
            while missing >= first and digests[(missing + 1) * span - 1] in index:
                missing -= 1
            if missing < first:
                break
            # Every shorter prefix that still reaches over this block needs it too.
            length = missing * size // self.unit * self.unit if beginnings is None else (missing + 1) * size - 1
        return length

    def _leading(self, rule: GroupRule, digests: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest run from token 0 on, up to token `limit`."""
        span = self.spans[rule.index]
        wanted = islice(digests, span - 1, limit // rule.block_size * span, span)
        found: list[int] = []
        with suppress(KeyError):  # what was found before the first miss stays
            found.extend(map(self._index[rule.index].__getitem__, wanted))
        return found
