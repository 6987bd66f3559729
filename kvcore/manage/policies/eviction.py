"""Which cached free block is given up first; blocks that were never cached go before any of them.

Policies keep a prefix together: who has read a block has read those before it, so neither `hits` nor `reach` of a
block exceeds that of the block before it, and a policy that grows with both gives up a prefix from its tail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # a registry names policies without numpy
    from kvcore.manage.ragged import Ints

MOST_LEVELS = 14  # that the pool's queues can tell apart


class EvictionPolicy(ABC):
    """What a free block whose content can still be hit is worth; one instance a pool.

    A block of level n is given up as if it had become free n lifetimes later, a lifetime being the time in which as
    many blocks become free as the pool holds. Level 0 alone is least recently used first. A policy comes from the
    hook `kvcore_eviction_policies`.

    Attributes:
        name: The value of `cache.eviction`, lower case and unique.
        levels: How many levels there are, 1 to `MOST_LEVELS`; with one, `level` is never asked.
    """

    name: ClassVar[str]
    levels: ClassVar[int] = MOST_LEVELS

    @abstractmethod
    def level(self, hits: Ints, reach: Ints) -> Ints:
        """The levels of blocks that have just become free.

        Args:
            hits: uint8 [n], how often the content of each was found again, 255 for more.
            reach: int32 [n], tokens of the longest request that has read each.

        Returns:
            Integers [n] from 0 to ``levels - 1``.
        """


class LRU(EvictionPolicy):
    """Least recently used first."""

    name: ClassVar[str] = "lru"
    levels: ClassVar[int] = 1

    def level(self, hits: Ints, reach: Ints) -> Ints:
        """All alike."""
        return hits * 0


class LFU(EvictionPolicy):
    """Least frequently used first, with age: each hit keeps a block for one lifetime more."""

    name: ClassVar[str] = "lfu"

    def level(self, hits: Ints, reach: Ints) -> Ints:
        """As many as hits."""
        return hits.clip(0, self.levels - 1)


class Cost(EvictionPolicy):
    """What is dear to compute again stays longer: content that was found again, and more so in long requests.

    A token at position p costs as much as ``1 + p / 16384`` tokens at the beginning: attention, which grows with p,
    takes as long as all else at some 16 thousand tokens in models of 7 to 8 billion weights. Content that nobody has
    ever found again is worth nothing, however long it took.
    """

    name: ClassVar[str] = "cost"

    def level(self, hits: Ints, reach: Ints) -> Ints:
        """Binary logarithm of hits times cost, from 1 on; 0 without a hit."""
        import numpy as np

        value = hits * (1 + reach / 16384)
        levels: Ints = np.log2(2 * value.clip(0.5)).astype(np.int64).clip(0, self.levels - 1)
        return levels


BUILT_IN: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRU, LFU, Cost)}
