"""`LargePagePool`: the blocks of groups that cut one arena with a ruler each (placement `packed`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from kvcore.errors import IntegrityError, OutOfBlocksError
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.large_pages.group_queues import GroupQueues
from kvcore.manage.large_pages.proof import check_pages
from kvcore.manage.policies.block_queue import NOWHERE, BlockQueue
from kvcore.manage.policies.eviction import LRU, EvictionPolicy
from kvcore.manage.ragged import Ints, spans
from kvcore.plan.config import KVCacheConfig

_FREE, _EVICTABLE = 0, 1  # tags of the queues of pages
NOBODY = -1
OnBlocks = Callable[[Ints], None]


class LargePagePool(BlockPool):
    r"""Large pages, each free or cut into the blocks of one group; page 0 holds the null blocks and belongs to nobody.

    Inside the manager a block has one number over all groups, so that everything else takes it for a plain block::

        group 0, 3 blocks a page    | . . . | 3 4 5 | 6 7 8 | ...         numbers 0 .. 3 L - 1
        group 1, 2 blocks a page    |  .  . |  2  3 |  4  5 | ...         numbers 3 L .. 5 L - 1
        large page                  |   0   |   1   |   2   | ... L - 1

    A page is *busy* while a block of it is in use or pending, *evictable* while all it holds is content that can
    still be hit, and free otherwise. A group that needs a block takes

    1. one without content, of a busy page of its own;
    2. the next of a free page;
    3. the next victim of its own policy, or of the evictable pages of others the one whose youngest block is oldest,
       where all of that page is older than the victim.

    Where the step would then run short of pages, victims in busy pages go first: a step is given its blocks whenever
    that is possible at all.

    Args:
        cuts: Blocks of each group in a large page.
        num_pages: Large pages, page 0 included.
        policy: The eviction policy inside each group.
        on_evict, on_death: As for `BlockPool`.

    Attributes:
        first: int64 [groups + 1], the number of each group's first id, and one past the last of all.
        cuts: int64 [groups].
        owner: By page, its group, or `NOBODY`.
        busy, kept: By page, blocks in use or pending, and free ones with content.
        parked: By group, blocks with content in evictable pages.
        free, evictable: Pages; those of the second by the age of their youngest block, the oldest first.
        queues: The blocks that each group can be given.
    """

    first: Ints
    unit = "large pages"

    def __init__(
        self,
        cuts: Sequence[int],
        num_pages: int,
        *,
        policy: type[EvictionPolicy] = LRU,
        on_evict: OnBlocks | None = None,
        on_death: OnBlocks | None = None,
    ) -> None:
        num_pages = max(1, num_pages)  # an arena of no page has room for nothing
        self.cuts: Ints = np.array(cuts, np.int64)
        self.first = np.concatenate(([0], (self.cuts * num_pages).cumsum()))
        self._group: Ints = np.repeat(np.arange(len(cuts)), self.cuts * num_pages).astype(np.uint8)
        super().__init__(int(self.first[-1]), policy=policy, on_evict=on_evict, on_death=on_death)
        ids = np.arange(self.num_blocks) - self.first[self._group]
        self._page: Ints = (ids // self.cuts[self._group]).astype(np.int32)
        self._freed_at: Ints = np.zeros(self.num_blocks, np.int64)
        self._clock = 0
        self.owner: Ints = np.full(num_pages, NOBODY, np.int16)
        # int64, as adding a number to other integers one by one takes 40 times as long.
        self.busy: Ints = np.zeros(num_pages, np.int64)
        self.kept: Ints = np.zeros(num_pages, np.int64)
        self._last: Ints = np.zeros(num_pages, np.int64)  # scratch of `_leave`
        self.parked: Ints = np.zeros(len(cuts), np.int64)
        places: Ints = np.full(num_pages, NOWHERE, np.int32)
        self.free = BlockQueue(places, _FREE, np.arange(1, num_pages, dtype=np.int32))
        self.evictable = BlockQueue(places, _EVICTABLE, places[:0])

    def _make_queues(self, policy: type[EvictionPolicy]) -> None:
        self.queues = GroupQueues(self.first, self._group, self._place, policy)

    @property
    def minds_reach(self) -> bool:
        """As for `BlockPool`."""
        return self.queues.victims[0].minds_reach

    def _hit(self, blocks: Ints) -> None:
        self.queues.hit(blocks)

    def _reached(self, blocks: Ints, tokens: int | Ints) -> None:
        self.queues.reached(blocks, tokens)

    @property
    def capacity(self) -> int:
        """Large pages but page 0."""
        return len(self.owner) - 1

    @property
    def num_free(self) -> int:
        """Large pages that any group can be given now."""
        return len(self.free) + len(self.evictable)

    @property
    def num_reusable(self) -> int:
        """Those of them whose content can still be hit."""
        return len(self.evictable)

    @property
    def num_used(self) -> int:
        """Large pages with a block in use or pending."""
        return self.capacity - self.num_free

    def blocks_of(self, group: int, pages: Ints) -> Ints:
        """The numbers of all blocks of a group's pages, page by page."""
        cut = int(self.cuts[group])
        return spans(self.first[group] + pages.astype(np.int64) * cut, np.full(len(pages), cut))

    def pages_of(self, blocks: Ints) -> Ints:
        """By block, its large page."""
        pages: Ints = self._page[blocks]
        return pages

    def _spare(self) -> Ints:
        """By group, the blocks that it can be given out of busy pages of its own."""
        queues = zip(self.queues.bare, self.queues.victims, strict=True)
        found: Ints = np.array([len(bare) + len(victims) for bare, victims in queues]) - self.parked
        return found

    def missing(self, needs: Sequence[int], revived: Collection[int] = ()) -> int:
        """Large pages that lack for a step; see `BlockPool.missing`."""
        if not (any(needs) or revived):
            return 0
        spare, pages = self._spare(), self.num_free
        if revived:
            hits = np.fromiter(revived, np.int64, len(revived))
            stuck = self.busy[self._page[hits]] > 0
            np.subtract.at(spare, self._group[hits[stuck]], 1)
            opened, counts = np.unique(self._page[hits[~stuck]], return_counts=True)
            owners = self.owner[opened]
            np.add.at(spare, owners, self.cuts[owners] - counts)
            pages -= len(opened)
        return max(0, int(self._pages_for(np.array(needs), spare).sum()) - pages)

    def fits_together(self, counts: Sequence[int]) -> bool:
        """Whether so many blocks of each group fit, each group's side by side."""
        return int((-(-np.array(counts) // self.cuts)).sum()) <= self.capacity

    def _pages_for(self, needs: Ints, spare: Ints) -> Ints:
        """By group, the pages that it must be given."""
        pages: Ints = -(-np.maximum(needs - spare, 0) // self.cuts)
        return pages

    def take(self, groups: Ints) -> Ints:
        """Hand out a block of the group that each entry names, int64 numbers, each with one holder.

        Raises:
            OutOfBlocksError: There are too few pages; nothing has changed.
        """
        needs = np.bincount(groups, minlength=len(self.cuts))
        due = self._pages_for(needs, self._spare())
        slack = self.num_free - int(due.sum())  # pages that may be opened beyond those
        if slack < 0:
            raise OutOfBlocksError(
                "not enough free large pages",
                field="large_pages",
                got=int(due.sum()),
                allowed=f"<= {self.num_free}",
                remedy="free or preempt a request, or retire steps that are done",
            )
        taken = np.zeros(len(groups), np.int64)
        for group in needs.nonzero()[0].tolist():
            blocks, opened = self._take_of(group, int(needs[group]), int(due[group]) + slack)
            slack -= max(0, opened - int(due[group]))
            taken[groups == group] = blocks
        self.queues.forget(taken)
        self.refs[taken] = 1
        self._last_reader[taken] = 0
        return taken

    def _take_of(self, group: int, count: int, most: int) -> tuple[Ints, int]:
        """`count` blocks of a group that opens at most `most` pages, and how many it has opened."""
        found, opened, bare = [np.zeros(0, np.int64)], 0, self.queues.bare[group]
        while count:
            if len(bare):
                blocks = bare.pop(min(count, len(bare))) + self.first[group]
            elif len(self.free) and opened < most:
                pages = self.free.pop(min(len(self.free), -(-count // int(self.cuts[group])), most - opened))
                opened += len(pages)
                blocks = self._open(group, pages, count)
            else:
                blocks, more = self._evict_for(group, count, may_open=opened < most)
                opened += more
            np.add.at(self.busy, self._page[blocks], 1)
            count -= len(blocks)
            found.append(blocks)
        return np.concatenate(found), opened

    def _open(self, group: int, pages: Ints, count: int) -> Ints:
        """Give pages to a group; returns up to `count` of their blocks, and lines the others up."""
        self.owner[pages] = group
        blocks = self.blocks_of(group, pages)
        self.queues.line_up(blocks[count:])
        return blocks[:count]

    def _evict_for(self, group: int, count: int, *, may_open: bool) -> tuple[Ints, int]:
        """At most `count` blocks that lose their content for a group, and how many pages that has opened."""
        if not may_open:
            every = self.queues.next_victims(group, self.num_blocks)
            return self._give_up(every[self.busy[self._page[every]] > 0][:count]), 0
        page = self.evictable.peek(1)[0] if len(self.evictable) else self.owner[:0]
        blocks = self.queues.next_victims(group, count)
        if len(page) and self.owner[page[0]] != group:
            older = self._freed_at[blocks] < self._freed_at[self.blocks_of(int(self.owner[page[0]]), page)].max()
            blocks = blocks[: len(older) if older.all() else int(older.argmin())]
            if not len(blocks):
                return self._rob(group, page, count), 1
        opening = (self.busy[self._page[blocks]] == 0).nonzero()[0]
        if len(opening):  # what is without content in that page comes next
            blocks = blocks[: int(opening[0]) + 1]
        return self._give_up(blocks), int(len(opening) > 0)

    def _give_up(self, blocks: Ints) -> Ints:
        """Victims of their own group lose their content."""
        self._revive(blocks)
        np.subtract.at(self.busy, self._page[blocks], 1)  # `_take_of` counts what it returns
        self._lose(blocks)
        return blocks

    def _rob(self, group: int, page: Ints, count: int) -> Ints:
        """An evictable page and all its content go to another group."""
        owner = int(self.owner[page[0]])
        blocks = self.blocks_of(owner, page)
        kept = blocks[self._cached[blocks]]
        kept = kept[np.argsort(self._freed_at[kept], kind="stable")]
        self.queues.remove(kept)
        self.evictable.remove(page)
        self.parked[owner] -= len(kept)
        self.kept[page] = 0
        self._lose(kept)
        return self._open(group, page, count)

    def _lose(self, blocks: Ints) -> None:
        if self._on_evict is not None:
            self._on_evict(blocks)
        self._cached[blocks] = False
        self.evictions += len(blocks)
        if self._on_death is not None:
            self._on_death(blocks)

    def _revive(self, free: Ints) -> None:
        """These blocks with content are about to have a holder; evictable pages among theirs become busy."""
        self.queues.remove(free)
        pages = self._page[free]
        opened = np.unique(pages[self.busy[pages] == 0])
        self.evictable.remove(opened)
        for owner, mine in self._by_owner(opened):
            self.parked[owner] -= int(self.kept[mine].sum())
            every = self.blocks_of(owner, mine)
            self.queues.line_up(every[~self._cached[every]])
        np.subtract.at(self.kept, pages, 1)
        np.add.at(self.busy, pages, 1)

    def _set_free(self, blocks: Ints) -> None:
        """Nobody holds or reads these any more; content that is not cached is dead."""
        if not len(blocks):
            return
        self._freed_at[blocks] = np.arange(self._clock, self._clock + len(blocks))
        self._clock += len(blocks)
        cached, pages = self._cached[blocks], self._page[blocks]
        dead = blocks[~cached]
        np.subtract.at(self.busy, pages, 1)
        np.add.at(self.kept, pages[cached], 1)
        self.queues.line_up(dead)
        self.queues.add(blocks[cached])
        self._leave(pages[self.busy[pages] == 0])
        if self._on_death is not None and len(dead):
            self._on_death(dead)

    def _leave(self, pages: Ints) -> None:
        """These pages are busy no more, in the order in which they were left: they are evictable, or free."""
        places = np.arange(len(pages))
        self._last[pages] = places
        pages = pages[self._last[pages] == places]
        for owner, mine in self._by_owner(pages):
            every = self.blocks_of(owner, mine)
            # Its blocks without content wait until the page is busy again.
            self.queues.withdraw(every[(self._place[every] > NOWHERE) & ~self._cached[every]])
            self.parked[owner] += int(self.kept[mine].sum())
        kept = self.kept[pages] > 0
        self.evictable.append(pages[kept])
        self._give_back(pages[~kept])

    def _give_back(self, pages: Ints) -> None:
        self.owner[pages] = NOBODY
        self.free.append(pages)

    def uncache(self, blocks: Ints) -> None:
        """The content of these cached blocks is of no use any more, whatever their state."""
        self._cached[blocks] = False
        free = self.free_among(blocks)
        self.queues.remove(free)
        pages = self._page[free]
        np.subtract.at(self.kept, pages, 1)
        busy = self.busy[pages] > 0
        self.queues.line_up(free[busy])
        np.subtract.at(self.parked, self._group[free[~busy]], 1)
        empty = np.unique(pages[~busy])
        empty = empty[self.kept[empty] == 0]
        self.evictable.remove(empty)
        self._give_back(empty)
        if self._on_death is not None and len(free):
            self._on_death(free)

    def _by_owner(self, pages: Ints) -> list[tuple[int, Ints]]:
        owners = self.owner[pages]
        return [(owner, pages[owners == owner]) for owner in np.unique(owners).tolist()]

    def check_integrity(self, holders: Mapping[int, int] | None = None) -> None:
        """Prove that large pages partition the arena, and blocks their page; O(pool).

        Args:
            holders: Entries of all tables, by block number; compared with the reference counts when given.

        Raises:
            IntegrityError: With the first contradiction.
        """
        waiting = [b[self._place[b] == tickets].tolist() for w in self._pending.values() for b, tickets in w]
        pending = {block for blocks in waiting for block in blocks}
        if len(pending) != self._num_pending or any(step <= self.retired for step in self._pending):
            raise IntegrityError("pending blocks are miscounted", field="pending", got=self._num_pending)
        check_pages(self, pending, self._cached.tolist(), holders)


def pool_of(config: KVCacheConfig, policy: type[EvictionPolicy], on_evict: OnBlocks, on_death: OnBlocks) -> BlockPool:
    """The pool of a plan, for either placement; see `BlockPool`."""
    if config.placement == "slots":
        return BlockPool(config.num_blocks, policy=policy, on_evict=on_evict, on_death=on_death)
    cuts = [g.blocks_per_large_page for g in config.kv_cache_groups]
    return LargePagePool(cuts, config.num_large_pages, policy=policy, on_evict=on_evict, on_death=on_death)
