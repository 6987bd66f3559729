"""`SlowPool`: large pages by the book, a block at a time, with searches where `LargePagePool` has queues."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

Block = tuple[int, int, int]  # group, page, place in the page


class SlowPool:
    """What the rules of `LargePagePool` say, without a thought for speed.

    Attributes:
        holders, pending, content: Of each block that has one: holders, the step it waits for, whether it can be hit.
        owner: Of each page; None where it is free.
        since: When each block became free.
        bare: When each block without content was put into its group's line.
        left: When each page became free.
        lost: Blocks whose content was given up, oldest first.
    """

    def __init__(self, cuts: list[int], num_pages: int) -> None:
        self.cuts, self.num_pages = cuts, num_pages
        self.time = count(1)
        self.retired = 0
        self.owner: dict[int, int | None] = dict.fromkeys(range(1, num_pages))
        self.left = {page: next(self.time) for page in self.owner}
        self.holders: dict[Block, int] = {}
        self.reader: dict[Block, int] = {}
        self.pending: dict[Block, int] = {}
        self.waiting: list[Block] = []
        self.content: set[Block] = set()
        self.since: dict[Block, int] = {}
        self.bare: dict[Block, int] = {}
        self.lost: list[Block] = []

    def number(self, block: Block) -> int:
        """As the pool numbers blocks."""
        group, page, place = block
        return sum(self.cuts[:group]) * self.num_pages + page * self.cuts[group] + place

    def block(self, number: int) -> Block:
        """The block of a number."""
        group = 0
        while number >= self.cuts[group] * self.num_pages:
            number -= self.cuts[group] * self.num_pages
            group += 1
        return group, *divmod(number, self.cuts[group])

    def of_page(self, page: int) -> list[Block]:
        group = self.owner[page]
        return [] if group is None else [(group, page, i) for i in range(self.cuts[group])]

    def busy(self, page: int) -> bool:
        return any(b in self.holders or b in self.pending for b in self.of_page(page))

    def evictable(self) -> list[int]:
        return [p for p, owner in self.owner.items() if owner is not None and not self.busy(p)]

    def idle(self, group: int) -> list[Block]:
        """Free blocks with content, least recently used first."""
        found = [b for b in self.content if b[0] == group and b not in self.holders and b not in self.pending]
        return sorted(found, key=self.since.__getitem__)

    def spare(self, group: int) -> list[Block]:
        """Blocks that the group can have without another page."""
        bare = sorted((b for b in self.bare if b[0] == group), key=self.bare.__getitem__)
        return bare + [b for b in self.idle(group) if self.busy(b[1])]

    def pages(self) -> list[int]:
        """Pages that anybody can have."""
        free = sorted((p for p, owner in self.owner.items() if owner is None), key=self.left.__getitem__)
        return free + self.evictable()

    def due(self, group: int, need: int) -> int:
        return -(-max(0, need - len(self.spare(group))) // self.cuts[group])

    def missing(self, needs: list[int], revived: Iterable[Block] = ()) -> int:
        """Pages that lack: hits first, then every group is given what it needs."""
        revived = set(revived)
        total, pages = 0, len(self.pages())
        opened = {b[1] for b in revived if not self.busy(b[1])}
        for group, need in enumerate(needs):
            spare = {b for b in self.spare(group) if b not in revived}
            for page in opened:
                spare |= {b for b in self.of_page(page) if b[0] == group and b not in revived}
            total += -(-max(0, need - len(spare)) // self.cuts[group])
        return max(0, total - (pages - len(opened)))

    def take(self, groups: list[int]) -> list[Block]:
        """A block for each entry, group by group."""
        needs = [groups.count(g) for g in range(len(self.cuts))]
        dues = [self.due(g, n) for g, n in enumerate(needs)]
        slack = len(self.pages()) - sum(dues)
        taken: list[list[Block]] = []
        for group, need in enumerate(needs):
            budget, mine = dues[group] + slack, []
            for _ in range(need):
                block, opened = self.take_one(group, budget)
                budget -= opened
                self.holders[block] = 1
                self.reader[block] = 0
                mine.append(block)
            slack = min(slack, budget)
            taken.append(mine)
        lines = [iter(mine) for mine in taken]
        return [next(lines[g]) for g in groups]

    def take_one(self, group: int, budget: int) -> tuple[Block, int]:
        bare = sorted((b for b in self.bare if b[0] == group), key=self.bare.__getitem__)
        if bare:
            del self.bare[bare[0]]
            return bare[0], 0
        free = sorted((p for p, owner in self.owner.items() if owner is None), key=self.left.__getitem__)
        if free and budget:
            return self.open(group, free[0]), 1
        own = self.idle(group)
        if not budget:
            block = next(b for b in own if self.busy(b[1]))
            self.lose(block)
            return block, 0
        others = [p for p in self.evictable() if self.owner[p] != group]
        age = {p: max(self.since.get(b, 0) for b in self.of_page(p)) for p in others}
        oldest = min(others, key=age.__getitem__, default=None)
        if own and (oldest is None or self.since[own[0]] < age[oldest]):
            block = own[0]
            opened = not self.busy(block[1])
            self.lose(block)
            if opened:
                self.line_up(b for b in self.of_page(block[1]) if b not in self.content and b != block)
            return block, int(opened)
        assert oldest is not None
        for block in sorted(set(self.of_page(oldest)) & self.content, key=self.since.__getitem__):
            self.lose(block)
        return self.open(group, oldest), 1

    def open(self, group: int, page: int) -> Block:
        self.owner[page] = group
        first, *rest = self.of_page(page)
        self.line_up(rest)
        return first

    def line_up(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.bare[block] = next(self.time)

    def lose(self, block: Block) -> None:
        self.content.discard(block)
        self.lost.append(block)

    def share(self, blocks: list[Block]) -> None:
        opened = {b[1] for b in blocks if not self.busy(b[1])}
        for block in blocks:
            self.pending.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1
        for page in sorted(opened):
            self.line_up(b for b in self.of_page(page) if b not in self.content)

    def release(self, blocks: list[Block], reader: int) -> None:
        for block in blocks:
            self.reader[block] = max(self.reader[block], reader)
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                if self.reader[block] > self.retired:
                    self.pending[block] = self.reader[block]
                    self.waiting = [b for b in self.waiting if b != block] + [block]
                else:
                    self.set_free(block)

    def retire(self, step: int) -> None:
        self.retired = max(self.retired, step)
        for due in sorted({s for s in self.pending.values() if s <= step}):
            for block in [b for b in self.waiting if self.pending.get(b) == due]:
                del self.pending[block]
                self.set_free(block)

    def set_free(self, block: Block) -> None:
        self.since[block] = next(self.time)
        if block not in self.content:
            self.line_up([block])
        self.settle(block[1])

    def settle(self, page: int) -> None:
        if self.busy(page):
            return
        mine = self.of_page(page)
        for block in mine:
            self.bare.pop(block, None)
        if not self.content & set(mine):
            self.owner[page] = None
            self.left[page] = next(self.time)

    def uncache(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.content.discard(block)
            if block not in self.holders and block not in self.pending and self.busy(block[1]):
                self.line_up([block])
        for page in sorted({b[1] for b in blocks}):
            if self.owner.get(page) is not None:
                self.settle(page)
