"""The free blocks of each group, addressed by numbers over all groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvcore.manage.policies.block_queue import BlockQueue
from kvcore.manage.policies.eviction import EvictionPolicy
from kvcore.manage.policies.victims import Victims
from kvcore.manage.ragged import Ints


class GroupQueues:
    """For every group a queue of blocks without content, and its victims.

    Args:
        first: By group, the number of its first id, and one past the last of all.
        group: The group of each number.
        place: int32 by number, where a block is; see `BlockQueue`.
        policy: Class of the eviction policy; one instance a group.
    """

    def __init__(self, first: Ints, group: Ints, place: Ints, policy: type[EvictionPolicy]) -> None:
        self._first, self._group = first, group
        places = [place[a:b] for a, b in pairwise(first.tolist())]
        self.bare = [BlockQueue(p, 0, p[:0]) for p in places]
        self.victims = [Victims(p, policy()) for p in places]

    def by_group(self, blocks: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """For each group that has some of `blocks`: the group, where they stand in `blocks`, and their ids."""
        groups = self._group[blocks]
        for group in np.unique(groups).tolist():
            at = (groups == group).nonzero()[0]
            yield group, at, (blocks[at] - self._first[group]).astype(np.int32)

    def line_up(self, blocks: Ints) -> None:
        """These blocks have no content and can be handed out, after those that could before."""
        for group, _, ids in self.by_group(blocks):
            self.bare[group].append(ids)

    def withdraw(self, blocks: Ints) -> None:
        """These blocks without content cannot be handed out one by one."""
        for group, _, ids in self.by_group(blocks):
            self.bare[group].remove(ids)

    def add(self, blocks: Ints) -> None:
        """The content of these can be lost from now on."""
        for group, _, ids in self.by_group(blocks):
            self.victims[group].add(ids)

    def remove(self, blocks: Ints) -> None:
        """These are no longer victims."""
        for group, _, ids in self.by_group(blocks):
            self.victims[group].remove(ids)

    def hit(self, blocks: Ints) -> None:
        """The content of these was found again."""
        for group, _, ids in self.by_group(blocks):
            self.victims[group].hit(ids)

    def reached(self, blocks: Ints, tokens: int | Ints) -> None:
        """Requests of so many tokens have read these."""
        for group, at, ids in self.by_group(blocks):
            self.victims[group].reached(ids, tokens if isinstance(tokens, int) else tokens[at])

    def forget(self, blocks: Ints) -> None:
        """These serve other content now."""
        for group, _, ids in self.by_group(blocks):
            self.victims[group].forget(ids)

    def next_victims(self, group: int, count: int) -> Ints:
        """Numbers of the next `count` victims of a group, or of all where there are fewer."""
        victims = self.victims[group]
        found: Ints = victims.first(min(count, len(victims))).astype(np.int64) + self._first[group]
        return found
