"""`Victims`: the free blocks whose content can still be hit, in the order in which a policy gives them up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.policies.block_queue import QUEUES, BlockQueue
from kvcore.manage.policies.eviction import EvictionPolicy
from kvcore.manage.ragged import Ints

_FIRST_TAG = 1  # tag 0 is the pool's queue of blocks without content


class Victims:
    """A queue for each level of the policy; a level is a head start in time.

    Args:
        place: int32 by block id, shared by the queues of the pool.
        policy: Says the level of each block.
    """

    def __init__(self, place: Ints, policy: EvictionPolicy) -> None:
        self._place, self._policy = place, policy
        self._queues = [BlockQueue(place, _FIRST_TAG + level, place[:0]) for level in range(policy.levels)]
        count = len(place) if policy.levels > 1 else 0  # one queue needs no more than its own order
        self._freed_at: Ints = np.zeros(count, np.int64)
        self._hits: Ints = np.zeros(count, np.uint8)
        self._reach: Ints = np.zeros(count, np.int32)
        self._clock = 0
        self.minds_reach = policy.levels > 1

    def __len__(self) -> int:
        """Blocks in all."""
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[int]:
        """The next victim first."""
        return iter(self.first(len(self)).tolist())

    def add(self, blocks: Ints) -> None:
        """These became free just now, in this order."""
        if len(self._queues) == 1:
            self._queues[0].append(blocks)
            return
        self._freed_at[blocks] = np.arange(self._clock, self._clock + len(blocks))
        self._clock += len(blocks)
        try:
            levels = self._levels(blocks)
        except BaseException:  # a policy is anybody's code, and no block may be lost
            self._queues[0].append(blocks)
            raise
        for level in sorted(set(levels.tolist())):
            self._queues[level].append(blocks[levels == level])

    def _levels(self, blocks: Ints) -> Ints:
        levels: Ints = np.asarray(self._policy.level(self._hits[blocks], self._reach[blocks]))
        if levels.shape != blocks.shape or not ((levels >= 0) & (levels < len(self._queues))).all():
            raise IntegrityError(
                "the eviction policy gave a level that does not exist",
                field="cache.eviction",
                got=levels.tolist(),
                allowed=f"{len(blocks)} levels from 0 to {len(self._queues) - 1}",
                remedy=f"repair the policy {type(self._policy).__name__}",
            )
        return levels

    def remove(self, blocks: Ints) -> None:
        """These are no longer candidates."""
        if len(self._queues) == 1:
            self._queues[0].remove(blocks)
            return
        tags = self._place[blocks] % QUEUES
        for tag in sorted(set(tags.tolist())):
            self._queues[tag - _FIRST_TAG].remove(blocks[tags == tag])

    def pop(self, count: int) -> Ints:
        """Take out and return the next `count` victims, int32; there are as many."""
        if len(self._queues) == 1:
            return self._queues[0].pop(count)
        blocks = self.first(count)
        self.remove(blocks)
        return blocks

    def hit(self, blocks: Ints) -> None:
        """The content of these was found again."""
        if len(self._hits):
            self._hits[blocks] = np.minimum(self._hits[blocks], 254) + 1

    def reached(self, blocks: Ints, tokens: int | Ints) -> None:
        """Requests of so many tokens have read these."""
        np.maximum.at(self._reach, blocks, np.asarray(tokens, np.int32))

    def forget(self, blocks: Ints) -> None:
        """These serve other content now."""
        if len(self._hits):
            self._hits[blocks] = 0
            self._reach[blocks] = 0

    def first(self, count: int) -> Ints:
        """The next `count` victims, int32; there are as many."""
        found = [queue.peek(min(count, len(queue)))[0] for queue in self._queues]
        blocks = np.concatenate(found)
        levels = np.repeat(np.arange(len(found)), [len(f) for f in found])
        if len(found) == 1:
            return blocks
        order = np.argsort(self._freed_at[blocks] + levels * len(self._place), kind="stable")
        first: Ints = blocks[order[:count]]
        return first
