"""`ContentTree`: the cached blocks of one group, each below the block that its prefix ends with, with their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from kvcore.manage.ragged import Ints
from kvcore.plan.config import NULL_BLOCK

_NONE = -1


class ContentTree:
    """What is cached, so that what comes nearest to a text can be told.

    ::

        root -- [the cat] -- [sat on] -- [the mat]
             |            `- [ran to]
             `- [a dog]

    Per block id its tokens (4 bytes each) and 20 bytes of links. A block whose parent is forgotten is no longer
    reached, as it can no longer be hit.

    Args:
        num_blocks: Block ids of the group, the null block included.
        block_size: Tokens of a block.
        root: The number of the null block, which stands above the blocks that begin a text.
    """

    def __init__(self, num_blocks: int, block_size: int, *, root: int = NULL_BLOCK) -> None:
        self.block_size, self.root = block_size, root
        self._tokens: Ints = np.zeros((num_blocks, block_size), np.uint32)
        none = array("i", [_NONE])
        self._parent, self._first, self._next, self._before = (none * num_blocks for _ in range(4))
        self._mark = array("i", [0]) * num_blocks

    def mark(self, block: int) -> int:
        """The number that a block was added with."""
        return self._mark[block - self.root]

    def tokens(self, block: int) -> Ints:
        """Its tokens, uint32 [block_size]."""
        view: Ints = self._tokens[block - self.root]
        return view

    def add(self, block: int, parent: int, tokens: Ints | tuple[int, ...], mark: int = 0) -> None:
        """A block became cached below `parent`."""
        block, parent = block - self.root, parent - self.root
        self._tokens[block] = tokens
        self._mark[block] = mark
        self._parent[block] = parent
        after = self._first[parent]
        self._next[block], self._before[block] = after, _NONE
        if after != _NONE:
            self._before[after] = block
        self._first[parent] = block

    def remove(self, block: int) -> None:
        """A block is forgotten; those below it are no longer reached."""
        block -= self.root
        parent, before, after = self._parent[block], self._before[block], self._next[block]
        if parent != _NONE:
            if before != _NONE:
                self._next[before] = after
            else:
                self._first[parent] = after
            if after != _NONE:
                self._before[after] = before
        for child in list(self._children(block)):
            self._parent[child] = self._next[child] = self._before[child] = _NONE
        self._parent[block] = self._first[block] = self._next[block] = self._before[block] = _NONE

    def clear(self) -> None:
        """Forget everything."""
        for links in (self._parent, self._first, self._next, self._before):
            for block, link in enumerate(links):
                if link != _NONE:
                    links[block] = _NONE

    def _children(self, block: int) -> Iterator[int]:
        """The blocks below one, the newest first; all less `root`."""
        child = self._first[block]
        while child != _NONE:
            yield child
            child = self._next[child]

    def closest(self, parent: int, tokens: Ints) -> tuple[list[int], int]:
        """The blocks below `parent` that share the longest beginning with these tokens, and its length.

        Args:
            parent: A cached block, or the root.
            tokens: uint32, at most a block of them.
        """
        children = list(self._children(parent - self.root))
        if not children:
            return [], 0
        alike = self._tokens[children, : len(tokens)] == tokens
        common = np.where(alike.all(axis=1), len(tokens), alike.argmin(axis=1))
        longest = int(common.max())
        found = [child for child, length in zip(children, common.tolist(), strict=True) if length == longest]
        return [child + self.root for child in found], longest
