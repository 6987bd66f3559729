"""`GroupRule`: what the manager needs to know of a KV group: block size and retention, nothing of heads."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, lcm

import numpy as np

from kvcore.errors import NotBuiltError, SpecError
from kvcore.manage.ragged import Ints
from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Retention, Window

# A state is a block that no request outgrows: it is held from the first step to the last, and as it is never full,
# nobody else finds it, nor any prefix of a model that has states.
STATE_TOKENS = 1 << 40


class GroupRule:
    """One KV group as the manager sees it.

    Args:
        index: The group's index.
        block_size: Tokens of a block.
        retention: `Full`, `Latest` with one state, `Window` without kept first tokens, `Chunk`, or one of a plugin:
            what it keeps of a sequence is a tail, which begins at `first_needed`.

    Attributes:
        drops: Whether tokens are ever given up.
        stores_nothing: No later query reads an earlier token (windows and chunks of one token), so that
            nothing stays between steps and nothing is worth caching.
    """

    __slots__ = ("block_size", "drops", "index", "retention", "stores_nothing")

    def __init__(self, index: int, block_size: int, retention: Retention) -> None:
        if isinstance(retention, Encoder) or (isinstance(retention, Latest) and retention.count > 1):
            raise NotBuiltError(
                f"the manager does not serve the retention {type(retention).__name__} yet",
                field=f"kv_cache_groups[{index}].spec.retention",
                got=type(retention).__name__,
                allowed=("Full", "Window", "Chunk", "Latest(1)", "those of plugins"),
                remedy="run a model without cross-attention; such models can be planned",
            )
        if isinstance(retention, Window) and retention.keep_first:
            raise NotBuiltError(
                "the manager does not keep the first tokens of a window yet",
                field=f"kv_cache_groups[{index}].spec.retention.keep_first",
                got=retention.keep_first,
                allowed=0,
                remedy="use a window with keep_first=0",
            )
        self.index = index
        self.block_size = block_size
        self.retention = retention
        self.drops = not isinstance(retention, Full | Latest)
        self.stores_nothing = isinstance(retention, Window | Chunk) and retention.size == 1

    @classmethod
    def of(cls, group: KVCacheGroupSpec) -> GroupRule:
        """The rule of a group of the plan."""
        size = STATE_TOKENS if group.spec.content.per_request else group.block_size
        return cls(group.index, size, group.spec.retention)

    def first_block(self, position: int) -> int:
        """Index of the first block that a query at `position`, or a later one, may read or write."""
        return self.retention.first_needed(position) // self.block_size if self.drops else 0

    def reads_before(self, position: int) -> bool:
        """Whether a query at `position`, or a later one, reads anything before it."""
        return self.retention.first_needed(position) < position if self.drops else position > 0

    def last_unread(self, position: int, least: int) -> int:
        """The last position from `position` down whose queries read nothing before it; `least` where none is above."""
        if type(self.retention) is Window and self.retention.size > 1:
            return least
        return next((p for p in range(position, least, -1) if not self.reads_before(p)), least)

    def first_blocks(self, positions: Ints) -> Ints:
        """`first_block` of each position."""
        retention, size = self.retention, self.block_size
        if type(retention) is Window:
            found: Ints = np.maximum(positions - (retention.size - 1), 0) // size
        elif type(retention) is Chunk:
            found = positions // retention.size * retention.size // size
        else:  # a plugin's, which answers one by one
            found = np.array([self.first_block(p) for p in positions.tolist()], np.int64)
        return found

    def drop_positions(self, blocks: Ints) -> Ints:
        """For each block index a position up to which `first_block` does not exceed it."""
        retention, size = self.retention, self.block_size
        if self.stores_nothing:  # nothing that was begun is read again either: there is always something to drop
            found: Ints = np.zeros_like(blocks)
        elif type(retention) is Window:
            found = (blocks + 1) * size + (retention.size - 2)
        elif type(retention) is Chunk:
            found = -(-(blocks + 1) * size // retention.size) * retention.size - 1
        else:
            found = np.zeros_like(blocks)  # not known: look each time
        return found


def rules_of(config: KVCacheConfig) -> tuple[GroupRule, ...]:
    """The rules of every group; `NotBuiltError` names what the manager does not serve yet."""
    if not config.kv_cache_groups:
        raise SpecError("there is nothing to manage: the plan has no groups", field="kv_cache_groups", got=0)
    return tuple(GroupRule.of(g) for g in config.kv_cache_groups)


def hash_block_size(rules: Iterable[GroupRule]) -> int:
    """Tokens of a digest: every block of every group is a whole number of them."""
    return gcd(*(r.block_size for r in rules))


def hit_unit(rules: Iterable[GroupRule]) -> int:
    """A hit ends on a multiple of this, where the blocks of all groups end."""
    return lcm(*(r.block_size for r in rules))
