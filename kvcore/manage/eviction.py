"""Which cached free block is given up first; blocks that were never cached go before any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from kvcore.manage.block_list import BlockList


class EvictionPolicy(ABC):
    """Orders the free blocks whose content can still be hit; one instance a pool.

    The pool calls `add` when such a block becomes free, `remove` when a hit revives it (or the cache is
    reset), and `pop` when it must hand one out. A policy comes from the hook `kvcore_eviction_policies`.

    Attributes:
        name: The value of `cache.eviction`, lower case and unique.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, num_blocks: int) -> None:
        """Start empty; ids are 1 .. ``num_blocks - 1``."""

    @abstractmethod
    def add(self, block: int) -> None:
        """`block` is free now, and was read until just now."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """`block` is no longer a candidate."""

    @abstractmethod
    def pop(self) -> int:
        """Give up one block, and forget it; called only when there is one."""

    @abstractmethod
    def __len__(self) -> int:
        """Candidates."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """All candidates, the next victim first; for proofs, not for the hot path."""


class LRU(EvictionPolicy):
    """Least recently used first."""

    name: ClassVar[str] = "lru"

    def __init__(self, num_blocks: int) -> None:
        self._blocks = BlockList(num_blocks)

    def add(self, block: int) -> None:
        """As the most recently used."""
        self._blocks.append(block)

    def remove(self, block: int) -> None:
        """In constant time."""
        self._blocks.remove(block)

    def pop(self) -> int:
        """The least recently used."""
        return self._blocks.pop_first()

    def __len__(self) -> int:
        """Candidates."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        """Least recently used first."""
        return iter(self._blocks)


BUILT_IN: dict[str, type[EvictionPolicy]] = {LRU.name: LRU}
