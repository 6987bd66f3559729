"""`PrefixCache`: the index (group, digest) -> block, and the longest prefix that every group can serve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.group_rule import GroupRule, hash_block_size, hit_unit
from kvcore.manage.ragged import Ints


class Hit(NamedTuple):
    """A prefix that can be attached.

    Attributes:
        tokens: Its length n, a multiple of the lcm of the block sizes.
        first_blocks: Per group, index of the first block that it needs.
        blocks: Per group, the ids that cover ``[first_needed(n), n)``.
    """

    tokens: int
    first_blocks: tuple[int, ...]
    blocks: tuple[list[int], ...]


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
        for block, digest in zip(blocks, digests, strict=True):
            self._digest[block] = digest
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

    def _tail(self, rule: GroupRule, digests: Sequence[bytes], length: int) -> int:
        """The longest prefix of at most `length` tokens, in hit units, that this group can serve."""
        index, span, size = self._index[rule.index], self.spans[rule.index], rule.block_size
        block = length // size - 1
        first = rule.first_block(length)
        while block >= first and length:
            if digests[(block + 1) * span - 1] in index:
                block -= 1
                continue
            # Every shorter prefix that still reaches over this block needs it too.
            length = block * size // self.unit * self.unit
            block, first = length // size - 1, rule.first_block(length)
        return length

    def find(self, digests: Sequence[bytes], limit: int) -> Hit:
        """The longest prefix of at most `limit` tokens that every group can serve, with its blocks; changes nothing.

        Groups that keep everything bound the length from above. The others then need only the blocks
        that a query behind the prefix still reads; whenever one of them cannot serve a length, the next
        shorter candidate is asked of all again, until they agree.
        """
        length = limit // self.unit * self.unit
        leading: dict[int, list[int]] = {}
        for rule in self._rules:
            if not rule.drops:
                found = leading[rule.index] = self._leading(rule, digests, length)
                length = min(length, len(found) * rule.block_size // self.unit * self.unit)
        partial = [r for r in self._rules if r.drops]
        while length:
            # The first group that falls short, if any.
            served = next((n for r in partial if (n := self._tail(r, digests, length)) < length), length)
            if served == length:
                break
            length = served
        firsts, rows = [], []
        for rule, index, span in zip(self._rules, self._index, self.spans, strict=True):
            first, end = rule.first_block(length), length // rule.block_size
            firsts.append(first)
            if rule.drops:
                rows.append([index[digest] for digest in digests[(first + 1) * span - 1 : end * span : span]])
            else:
                rows.append(leading[rule.index][:end])
        return Hit(length, tuple(firsts), tuple(rows))

    def _leading(self, rule: GroupRule, digests: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest run from token 0 on, up to token `limit`."""
        span = self.spans[rule.index]
        wanted = islice(digests, span - 1, limit // rule.block_size * span, span)
        found = []
        for block in map(self._index[rule.index].get, wanted):
            if block is None:
                break
            found.append(block)
        return found
