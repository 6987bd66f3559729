"""`BlockList`: a doubly linked list of block ids in two flat integer arrays."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.errors import IntegrityError

_ABSENT = -1
# Id 0 is the null block, which is in no list: its entries are the list's two ends.
_ENDS = 0


class BlockList:
    """An ordered set of block ids; every change takes constant time, and no object a block.

    ::

        next  [ 5 | -1 |  0 | -1 | -1 |  2 ]      the list 5, 2 of a pool of six ids
        prev  [ 2 | -1 |  5 | -1 | -1 |  0 ]      entry 0: first and last

    Args:
        num_blocks: Ids are 1 .. ``num_blocks - 1``.
        full: Start with every id, in order, instead of empty.
    """

    __slots__ = ("_next", "_prev", "_size")

    _next: list[int]
    _prev: list[int]
    _size: int

    def __init__(self, num_blocks: int, *, full: bool = False) -> None:
        if full:
            self._next = [*range(1, num_blocks), _ENDS]
            self._prev = [num_blocks - 1, *range(num_blocks - 1)]
            self._size = num_blocks - 1
        else:
            self._next = [_ENDS] + [_ABSENT] * (num_blocks - 1)
            self._prev = [_ENDS] + [_ABSENT] * (num_blocks - 1)
            self._size = 0

    def __len__(self) -> int:
        """Ids in the list."""
        return self._size

    def __contains__(self, block: int) -> bool:
        """Whether `block` is in the list."""
        return self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """From the first to the last; raises `IntegrityError` where the links contradict themselves."""
        before, block = _ENDS, self._next[_ENDS]
        for _ in range(self._size):
            if block in (_ENDS, _ABSENT) or self._prev[block] != before:
                raise IntegrityError("a list of blocks is broken", field="links", got=(before, block))
            yield block
            before, block = block, self._next[block]
        if block != _ENDS or self._prev[_ENDS] != before:
            raise IntegrityError("a list of blocks does not end", field="links", got=(before, block))

    def append(self, block: int) -> None:
        """Put `block` last."""
        if self._next[block] != _ABSENT or block == _ENDS:
            raise IntegrityError("a block enters a list twice", field="block", got=block)
        last = self._prev[_ENDS]
        self._next[last] = self._prev[_ENDS] = block
        self._prev[block] = last
        self._next[block] = _ENDS
        self._size += 1

    def remove(self, block: int) -> None:
        """Take `block` out, wherever it is."""
        after, before = self._next[block], self._prev[block]
        if after == _ABSENT or block == _ENDS:
            raise IntegrityError("a block leaves a list that it is not in", field="block", got=block)
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _ABSENT
        self._size -= 1

    def pop_first(self) -> int:
        """Take out and return the first id."""
        block = self._next[_ENDS]
        if block == _ENDS:
            raise IntegrityError("an empty list of blocks gives none", field="blocks", got=0)
        self.remove(block)
        return block
