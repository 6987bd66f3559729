"""`Prefixes`: which prefixes of requests can be found again, and how they get there and leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcore.errors import RequestError
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.group_rule import STATE_TOKENS, hash_block_size
from kvcore.manage.prefix.block_hash import BlockHasher, Chain, Extra
from kvcore.manage.prefix.prefix_cache import Hit, PrefixCache
from kvcore.manage.prefix.siblings import Beginnings, Siblings
from kvcore.manage.ragged import Ints
from kvcore.manage.requests import NEVER, Requests
from kvcore.manage.watch.events import Cleared, EventLog, Removed, Stored


class Fresh(NamedTuple):
    """Digests that were just made: of each request `counts` from index `first` on, one after the other."""

    first: Ints
    counts: Ints
    digests: list[bytes]

    def of(self, first: Ints, counts: Ints, span: int) -> list[bytes] | None:
        """They themselves, where they are those of blocks ``first .. first + counts - 1``; in a decode they are."""
        same = (
            span == 1
            and len(first) == len(self.first)
            and not np.count_nonzero((first != self.first) | (counts != self.counts))
        )
        return self.digests if same else None


class Prefixes:
    """Digests of requests, the index of blocks by digest, and the events of its changes.

    Args:
        requests: The requests.
        num_blocks: Block ids, the null block included.
        hash_name: See `BlockHasher`.
        namespace: See `BlockHasher`.
        events: Where changes are told.
        enabled: Whether anything is cached at all.
        partial: Whether the beginning of a cached block is reused where the rest of it is unlike.

    Attributes:
        cache: The index.
        epoch: How often it was reset.
    """

    def __init__(
        self,
        requests: Requests,
        num_blocks: int,
        *,
        hash_name: str,
        namespace: bytes,
        events: EventLog,
        enabled: bool,
        partial: bool,
    ) -> None:
        self.enabled = enabled
        self.epoch = 0
        self.cache = PrefixCache(requests.rules, num_blocks)
        # A state is of use at the one length that it was kept for.
        partial = partial and enabled and self.cache.unit < STATE_TOKENS
        sizes = [r.block_size for r in requests.rules] if partial else []
        self._siblings = tuple(Siblings(num_blocks, size) for size in sizes)
        self._requests, self._events = requests, events
        self._hasher = BlockHasher(hash_block_size(requests.rules), name=hash_name, namespace=namespace)
        self._version = 0  # of the index
        self._hits: dict[int, tuple[int, Hit]] = {}  # the last search by row, and the version that it holds for

    def chain(self, salt: str, extras: Sequence[Extra]) -> Chain:
        """The digests of a request that begins."""
        return self._hasher.chain(salt, extras)

    def find(self, row: int) -> Hit:
        """The longest prefix that the cache holds now for a request that is not admitted."""
        memo = self._hits.get(row)
        if memo is not None and memo[0] == self._version:
            return memo[1]
        # The last token must be computed, for its logits.
        limit = int(self._requests.known[row]) - 1 if self.enabled else 0
        digests = self._requests.chain(row).digests
        if limit // self._hasher.block_size > len(digests):
            self._hash_one(row, limit)
        hit = self.cache.find(digests, limit, self._beginnings(row, limit) if self._siblings else None)
        self._hits[row] = self._version, hit
        return hit

    def find_whole(self, row: int) -> Hit:
        """As `find`, of whole blocks alone, after it: nothing is copied."""
        return self.cache.find(self._requests.chain(row).digests, int(self._requests.known[row]) - 1)

    @property
    def unit(self) -> int:
        """The length of a hit is a multiple of this."""
        return 1 if self._siblings else self.cache.unit

    def _beginnings(self, row: int, limit: int) -> Beginnings:
        r = self._requests
        sizes, tokens = [rule.block_size for rule in r.rules], r.tokens.view(row)[:limit]
        return Beginnings(self._siblings, sizes, self.cache.spans, r.chain(row), tokens)

    def forget(self, row: int) -> None:
        """A request enters or ends: its search is of no use any more."""
        self._hits.pop(row, None)

    def known(self, row: int) -> Ints:
        """The blocks by which others could find what this request has offered."""
        r = self._requests
        return self.cache.known(r.chain(row).digests, r.offered[row].tolist())

    def register(self, rows: Ints, pool: BlockPool) -> None:
        """Offer the blocks that are full and committed to the prefix cache; the first of equals stays."""
        r = self._requests
        if not self.enabled:
            return
        if self.epoch:  # what ran before a reset stays out
            rows = rows[r.epoch[rows] == self.epoch]
        committed = r.committed[rows]
        fresh, counts = self._hash(rows, committed), committed[:, None] // r.sizes
        offered, held = r.offered.take(rows, axis=0), r.held(rows)
        counts -= offered
        if r.some_store_nothing:
            counts[:, ~r.stores] = 0
        np.maximum(counts, 0, out=counts)
        r.offered[rows] = offered + counts
        for group in range(r.groups):
            first, count = offered[:, group], counts[:, group]
            blocks = r.blocks.gather(rows * r.groups + group, first - held[:, group], count)
            digests = fresh.of(first, count, self.cache.spans[group]) or self._digests(rows, group, first, count)
            stored = self.cache.insert(group, digests, blocks.tolist())
            if len(stored):
                pool.set_cached(stored)
                self._version += 1
                if self._siblings:
                    self._add_siblings(rows, group, first, count, set(stored.tolist()))
                if self._events.enabled:
                    self._tell_stored(rows, group, first, count, set(stored.tolist()))

    def next_full(self, rows: Ints) -> Ints:
        """[n]: a position up to which there is nothing to `register` of each of these requests."""
        if not self.enabled:
            return np.full(len(rows), NEVER)
        r = self._requests
        return np.where(r.epoch[rows] == self.epoch, r.next_full(rows), NEVER) if self.epoch else r.next_full(rows)

    def _digests(self, rows: Ints, group: int, first: Ints, count: Ints) -> list[bytes]:
        """Of these requests' blocks ``first .. first + count - 1`` in a group."""
        chains, span = self._requests.chains_of(rows), self.cache.spans[group]
        begin, end = ((first + 1) * span - 1).tolist(), ((first + count) * span).tolist()
        return [digest for chain, i, j in zip(chains, begin, end, strict=True) for digest in chain.digests[i:j:span]]

    def _add_siblings(self, rows: Ints, group: int, first: Ints, count: Ints, stored: set[int]) -> None:
        for row, b, block, own in self._stored(rows, group, first, count, stored):
            chain, size = self._requests.chain(row), len(own)
            if not chain.has_items(b * size, (b + 1) * size):
                parent = chain.digests[b * self.cache.spans[group] - 1] if b else chain.root
                self._siblings[group].add(block, parent, own)

    def _tell_stored(self, rows: Ints, group: int, first: Ints, count: Ints, stored: set[int]) -> None:
        r, span = self._requests, self.cache.spans[group]
        for row, b, block, own in self._stored(rows, group, first, count, stored):
            digests, origin = r.chain(row).digests, r.origin(row)
            parent = digests[b * span - 1] if b else None
            digest = digests[(b + 1) * span - 1]
            tokens = tuple(own.tolist())
            self._events.add(Stored(group, digest, block, parent, tokens, origin.salt, origin.adapters))

    def _stored(
        self, rows: Ints, group: int, first: Ints, count: Ints, stored: set[int]
    ) -> Iterator[tuple[int, int, int, Ints]]:
        """(row, index, block, tokens) of each block of `stored`, once, although a fork has it too."""
        r = self._requests
        size = r.rules[group].block_size
        held = r.held(rows)[:, group].tolist()
        for i, (row, begin, number) in enumerate(zip(rows.tolist(), first.tolist(), count.tolist(), strict=True)):
            tokens, blocks = r.tokens.view(row), r.blocks.view(row * r.groups + group)
            for b in range(begin, begin + number):
                block = int(blocks[b - held[i]])
                if block in stored:
                    stored.remove(block)
                    yield row, b, block, tokens[b * size : (b + 1) * size]

    def _hash(self, rows: Ints, tokens: Ints) -> Fresh:
        """Extend the chains of these requests over the whole runs of their first tokens."""
        r, run = self._requests, self._hasher.block_size
        done, runs = r.hashed[rows], tokens // run
        counts = np.maximum(runs - done, 0)
        some = counts.nonzero()[0]
        if not len(some):
            return Fresh(done[:0], counts[:0], [])
        if len(some) < len(rows):
            rows, done, counts = rows[some], done[some], counts[some]
        data = r.tokens.pieces(rows, done * run, counts, run)
        digests = self._hasher.extend(r.chains_of(rows), counts.tolist(), data)
        r.hashed[rows] = done + counts
        return Fresh(done, counts, digests)

    def _hash_one(self, row: int, tokens: int) -> None:
        """As `_hash`, of one request: without the cost of arrays."""
        r, run = self._requests, self._hasher.block_size
        done, runs = int(r.hashed[row]), tokens // run
        self._hasher.extend([r.chain(row)], [runs - done], r.tokens.view(row)[done * run : runs * run].tobytes())
        r.hashed[row] = runs

    def remove(self, blocks: Ints) -> None:
        """These blocks serve other content from now on."""
        numbers = blocks.tolist()
        removed = self.cache.remove(numbers)
        if self._siblings or self._events.enabled:
            for block, (group, digest) in zip(numbers, removed, strict=True):
                if self._siblings:
                    self._siblings[group].remove(block)
                self._events.add(Removed(group, digest, block))
        self._version += len(blocks)

    def reset(self) -> Ints:
        """Forget everything; returns the blocks that were known."""
        self.epoch += 1
        self._version += 1
        for siblings in self._siblings:
            siblings.clear()
        self._events.add(Cleared())
        return self.cache.clear()


class Pins:
    """Prefixes that stay cached until they are given free again, however full the cache is.

    Args:
        pool: The blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pinned: dict[int, Ints] = {}
        self._made = 0

    def add(self, blocks: Ints) -> int:
        """Hold these blocks; returns the number of the pin."""
        self._pool.share(blocks)
        self._made += 1
        self._pinned[self._made] = blocks
        return self._made

    def remove(self, pin: int) -> None:
        """Let go of a pin; `RequestError` for one that is not held."""
        if pin not in self._pinned:
            raise RequestError("nothing is pinned under this number", field="pin", got=pin, allowed=list(self._pinned))
        self._pool.release(self._pinned.pop(pin)[::-1], 0)

    def count(self, holders: dict[int, int]) -> dict[int, int]:
        """`holders` of each block, and the pins that hold it."""
        for blocks in self._pinned.values():
            for block in blocks.tolist():
                holders[block] = holders.get(block, 0) + 1
        return holders
