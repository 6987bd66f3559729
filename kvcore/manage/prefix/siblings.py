"""`Siblings` and `Beginnings`: cached blocks that begin as a text does, though they do not hold the text whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcore.manage.prefix.block_hash import Chain
from kvcore.manage.ragged import Ints


class Siblings:
    """The cached blocks of one group by what lies before them, with their tokens.

    ::

        digest of "the cat" -- [sat on the mat]
                            `- [sat by the door]

    Per cached block its tokens (4 bytes each), an entry of a list, and one of a dict where it has no siblings.

    Args:
        num_blocks: Block ids, the null block included.
        block_size: Tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._tokens: Ints = np.zeros((num_blocks, block_size), np.uint32)
        self._parent: dict[int, bytes] = {}
        self._below: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._parent)

    def add(self, block: int, parent: bytes, tokens: Ints) -> None:
        """A block became cached behind the content that `parent` is the digest of."""
        self._tokens[block] = tokens
        self._parent[block] = parent
        self._below.setdefault(parent, []).append(block)

    def remove(self, block: int) -> None:
        """A block is forgotten, if it was known."""
        parent = self._parent.pop(block, None)
        if parent is not None:
            self._below[parent].remove(block)
            if not self._below[parent]:
                del self._below[parent]

    def clear(self) -> None:
        """Forget everything."""
        self._parent.clear()
        self._below.clear()

    def closest(self, parent: bytes, tokens: Ints) -> tuple[int, int]:
        """The first cached of those blocks that share the longest beginning with some tokens, and its length.

        Args:
            parent: Digest of what lies before.
            tokens: uint32, one to a block of them.

        Returns:
            (0, 0), the null block, where nothing is shared.
        """
        found = self._below.get(parent)
        if found is None:
            return 0, 0
        alike = self._tokens[found, : len(tokens)] == tokens
        common = np.where(alike.all(axis=1), len(tokens), alike.argmin(axis=1))
        best = int(common.argmax())
        return (found[best], int(common[best])) if common[best] else (0, 0)


class Part(NamedTuple):
    """The beginning of a block of a text, as a cached block has it.

    Attributes:
        block: The cached block; 0 for none.
        tokens: How many tokens they share.
    """

    block: int
    tokens: int


NOTHING = Part(0, 0)


class Beginnings:
    """What blocks of one text share with cached blocks; each is looked up once.

    Args:
        siblings: Of each group.
        sizes: Block size of each group.
        spans: Digests a block, of each group.
        chain: Digests of the text.
        tokens: uint32, the text as far as it may be reused.
    """

    def __init__(
        self, siblings: Sequence[Siblings], sizes: Sequence[int], spans: Sequence[int], chain: Chain, tokens: Ints
    ) -> None:
        self._siblings, self._sizes, self._spans = siblings, sizes, spans
        self._chain, self._text = chain, tokens
        self._found: dict[tuple[int, int], Part] = {}

    def of(self, group: int, block: int) -> Part:
        """The cached block that shares most with the block of this index.

        Where a token stands for an image or an embedding, equal ids say nothing: such a block is reused whole or not.
        """
        found = self._found.get((group, block))
        if found is None:
            found = self._found[group, block] = self._find(group, block)
        return found

    def _find(self, group: int, block: int) -> Part:
        size, span = self._sizes[group], self._spans[group]
        tokens = self._text[block * size : (block + 1) * size]
        if not len(tokens) or self._chain.has_items(block * size, (block + 1) * size):
            return NOTHING
        parent = self._chain.digests[block * span - 1] if block else self._chain.root
        return Part(*self._siblings[group].closest(parent, tokens))
