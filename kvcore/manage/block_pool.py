"""`BlockPool`: who holds each block id, and which one is handed out next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from kvcore.errors import ConfigError, IntegrityError, OutOfBlocksError
from kvcore.manage.policies.block_queue import NOWHERE, BlockQueue
from kvcore.manage.policies.eviction import LRU, EvictionPolicy
from kvcore.manage.policies.victims import Victims
from kvcore.manage.ragged import Ints
from kvcore.plan.config import NULL_BLOCK

_FRESH = 0  # tag of the queue of free blocks without content
_FIRST_TICKET = NOWHERE - 1  # places of pending blocks count down from here


class BlockPool:
    r"""Block ids 1 .. ``num_blocks - 1``; id 0 is the null block, never handed out.

    An id is in exactly one state::

        free -- take --> in use -- last release --> pending -- retire(step) --> free
          \______________ ^ ^_________ share ______/    (straight to free when the
                 share (a cached one)                     reading step has retired)

    Pending blocks have no holder, but a step that may read them has not retired. Free blocks that were
    never cached go first, oldest first; then the eviction policy chooses among the cached ones.
    Everything is flat integer arrays; no call costs more than the blocks it names.

    Args:
        num_blocks: Ids, the null block included.
        policy: The eviction policy.
        on_evict: Called with cached blocks that are about to be handed out.
        on_death: Called with blocks whose content can no longer be read nor hit: when their last reader is
            done, if they are not cached; when they are evicted; when the cache forgets them.

    Attributes:
        first: By group, the number of its first id; None where all groups share one numbering.
        on_release: Called with blocks that nobody holds any more, where anybody wants to know.
        unit: What `num_free` and `missing` count.
        refs: int32, holders of each id; read only.
        retired: The last step known to be done.
        evictions: Cached blocks that were handed out.
    """

    first: Ints | None = None
    on_release: Callable[[Ints], None] | None = None
    unit: ClassVar[str] = "blocks"

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: type[EvictionPolicy] = LRU,
        on_evict: Callable[[Ints], None] | None = None,
        on_death: Callable[[Ints], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(
                "a pool holds at least the null block", field="num_blocks", got=num_blocks, allowed=">= 1"
            )
        self.num_blocks = num_blocks
        self.refs: Ints = np.zeros(num_blocks, np.int32)
        self.retired = 0
        self.evictions = 0
        self._on_evict = on_evict
        self._on_death = on_death
        self._place: Ints = np.full(num_blocks, NOWHERE, np.int32)
        self._make_queues(policy)
        self._cached = np.zeros(num_blocks, np.bool_)
        self._last_reader: Ints = np.zeros(num_blocks, np.int32)
        self._latest = 0  # of all that `_last_reader` ever held
        # Pending blocks by last reader, in the order of their release, each with its ticket. An entry counts only
        # while the block's place is its ticket: a block can be revived, and released again later.
        self._pending: dict[int, list[tuple[Ints, Ints]]] = {}
        self._next_ticket = _FIRST_TICKET
        self._num_pending = 0

    def _make_queues(self, policy: type[EvictionPolicy]) -> None:
        self._fresh = BlockQueue(self._place, _FRESH, np.arange(1, self.num_blocks, dtype=np.int32))
        self._victims = Victims(self._place, policy())  # free, content can be hit

    @property
    def capacity(self) -> int:
        """Blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._fresh) + len(self._victims)

    @property
    def minds_reach(self) -> bool:
        """Whether the policy asks how long the requests were that read a block."""
        return self._victims.minds_reach

    @property
    def num_reusable(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._victims)

    @property
    def num_pending(self) -> int:
        """Blocks without a holder that wait for a step to retire."""
        return self._num_pending

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - 1 - self.num_free - self._num_pending

    def pages_of(self, blocks: Ints) -> Ints:
        """By block, a number of what goes to another group as one: each block by itself."""
        return blocks

    def free_among(self, blocks: Ints) -> Ints:
        """Those of `blocks` of which a `share` would leave one less to hand out."""
        return blocks[self._place[blocks] > NOWHERE]

    def missing(self, needs: Sequence[int], revived: Collection[int] = ()) -> int:
        """Blocks that lack for a step.

        Args:
            needs: By group, blocks to hand out.
            revived: Free blocks that hits of the step bring back to life.
        """
        wanted = sum(needs) + len(revived)
        return max(0, wanted - self.num_free) if wanted else 0

    def fits_together(self, counts: Sequence[int]) -> bool:
        """Whether so many blocks of each group are there at all, were nobody else to hold any."""
        return sum(counts) <= self.capacity

    def take(self, groups: Ints) -> Ints:
        """Hand out a block for each entry, each with one holder.

        Args:
            groups: [n], for which group each is; all the same to this pool.

        Raises:
            OutOfBlocksError: Fewer are free; nothing has changed.
        """
        count = len(groups)
        if count > self.num_free:
            raise OutOfBlocksError(
                "not enough free blocks",
                field="blocks",
                got=count,
                allowed=f"<= {self.num_free}",
                remedy="free or preempt a request, or retire steps that are done",
            )
        taken = self._fresh.pop(min(count, len(self._fresh)))
        if len(taken) < count:
            try:
                taken = np.concatenate((taken, self._evict(count - len(taken))))
            except BaseException:
                self._fresh.append(taken)
                raise
        self._victims.forget(taken)
        self.refs[taken] = 1
        self._last_reader[taken] = 0
        return taken

    def _evict(self, count: int) -> Ints:
        blocks = self._victims.pop(count)
        if self._on_evict is not None:
            try:
                self._on_evict(blocks)
            except BaseException:
                self._victims.add(blocks)
                raise
        self._cached[blocks] = False
        self.evictions += count
        if self._on_death is not None:
            self._on_death(blocks)
        return blocks

    def share(self, blocks: Ints) -> None:
        """Give each of these distinct blocks one more holder; free and pending ones come back to life."""
        if len(blocks) and blocks.min() <= NULL_BLOCK:
            raise IntegrityError("the null block has no holder", field="block", got=int(blocks.min()))
        idle = blocks[self.refs[blocks] == 0]
        if len(idle):
            pending = self._place[idle] < NOWHERE
            self._num_pending -= int(np.count_nonzero(pending))
            self._place[idle[pending]] = NOWHERE
            self._revive(idle[~pending])
        self._hit(blocks)
        self.refs[blocks] += 1

    def _revive(self, free: Ints) -> None:
        """These free blocks are about to have a holder."""
        cached = self._cached[free]
        self._victims.remove(free[cached])
        self._fresh.remove(free[~cached])

    def _hit(self, blocks: Ints) -> None:
        self._victims.hit(blocks)

    def _reached(self, blocks: Ints, tokens: int | Ints) -> None:
        self._victims.reached(blocks, tokens)

    def release(self, blocks: Ints, last_reader: int | Ints, reach: int | Ints = 0, *, distinct: bool = False) -> None:
        """Take one holder from each block, in the order in which they should be given up.

        Args:
            blocks: Blocks in use; of a request, the tail first. One with several holders may come several times.
            last_reader: The last step that may read them on behalf of this holder; one for all, or for each.
            reach: Tokens of the holder, likewise.
            distinct: Whether none comes twice, as those of one holder do not.
        """
        if not len(blocks):
            return
        blocks = blocks.astype(np.int64)  # numpy would do it at each of the uses below
        refs, held = self.refs, self.refs[blocks]
        if held.min() < 1 or blocks.min() <= NULL_BLOCK:
            wrong = blocks[(held < 1) | (blocks <= NULL_BLOCK)]
            raise IntegrityError("a block is released that nobody holds", field="block", got=int(wrong[0]))
        if self.minds_reach:
            self._reached(blocks, reach)
        latest = last_reader if isinstance(last_reader, int) else int(last_reader.max())
        if latest > self.retired:  # else the reader is done, and nobody waits for it
            np.maximum.at(self._last_reader, blocks, np.asarray(last_reader, np.int32))
            self._latest = max(self._latest, latest)
        if held.max() > 1:
            if distinct:
                refs[blocks] = held - 1
                blocks = blocks[held == 1]
            else:
                blocks = self._let_go(blocks)
        else:
            refs[blocks] = 0
        if self.on_release is not None:
            self.on_release(blocks)
        if self._latest > self.retired:
            late = self._last_reader[blocks] > self.retired
            if np.count_nonzero(late):
                self._defer(blocks[late])
                blocks = blocks[~late]
        self._set_free(blocks)

    def _let_go(self, blocks: Ints) -> Ints:
        """Take the holders of blocks that may have several; returns those without one now, where each comes last."""
        distinct, from_the_end, counts = np.unique(blocks[::-1], return_index=True, return_counts=True)
        left = self.refs[distinct] - counts
        if left.min() < 0:
            got = distinct[left < 0].tolist()
            raise IntegrityError("a block is released more often than it is held", field="block", got=got)
        self.refs[distinct] = left
        last = np.sort(len(blocks) - 1 - from_the_end[left == 0])
        gone: Ints = blocks[last]
        return gone

    def _defer(self, blocks: Ints) -> None:
        if not self._num_pending:
            self._next_ticket = _FIRST_TICKET
            self._pending.clear()
        tickets = np.arange(self._next_ticket, self._next_ticket - len(blocks), -1, dtype=np.int32)
        self._next_ticket -= len(blocks)
        self._place[blocks] = tickets
        self._num_pending += len(blocks)
        readers = self._last_reader[blocks]
        if readers.min() == readers.max():  # of one step, as nearly always
            self._pending.setdefault(int(readers[0]), []).append((blocks, tickets))
            return
        for step in sorted(set(readers.tolist())):
            mine = readers == step
            self._pending.setdefault(step, []).append((blocks[mine], tickets[mine]))

    def _set_free(self, blocks: Ints) -> None:
        """Nobody holds or reads these any more; content that is not cached is dead."""
        cached = self._cached[blocks]
        if np.count_nonzero(cached) < len(blocks):
            dead, blocks = blocks[~cached], blocks[cached]
            self._fresh.append(dead)
            if self._on_death is not None:
                self._on_death(dead)
        if len(blocks):
            self._victims.add(blocks)

    def retire(self, step: int) -> None:
        """All steps up to `step` are done: their pending blocks can be handed out."""
        if step <= self.retired:
            return
        self.retired = step
        due = sorted(s for s in self._pending if s <= step)
        waiting = [entry for s in due for entry in self._pending.pop(s)]
        if waiting:
            live = np.concatenate([blocks[self._place[blocks] == tickets] for blocks, tickets in waiting])
            self._place[live] = NOWHERE
            self._num_pending -= len(live)
            self._set_free(live)

    def set_cached(self, blocks: Ints) -> None:
        """The content of these blocks, which are in use, can be hit from now on."""
        if np.count_nonzero(self.refs[blocks] == 0):
            raise IntegrityError("only a block in use becomes cached", field="block", got=blocks.tolist())
        if np.count_nonzero(self._cached[blocks]):
            raise IntegrityError("a block is cached under two digests", field="block", got=blocks.tolist())
        self._cached[blocks] = True

    def uncache(self, blocks: Ints) -> None:
        """The content of these cached blocks is of no use any more, whatever their state."""
        self._cached[blocks] = False
        free = self.free_among(blocks)
        self._victims.remove(free)
        self._set_free(free)

    def check_integrity(self, holders: Mapping[int, int] | None = None) -> None:
        """Prove that every id is in exactly one state; O(pool).

        Args:
            holders: Entries of all tables, by block; compared with the reference counts when given.

        Raises:
            IntegrityError: With the first contradiction.
        """
        state: list[str | None] = [None] * self.num_blocks
        state[NULL_BLOCK] = "null"
        self._claim(state, "free", self._fresh, len(self._fresh), cached=False)
        self._claim(state, "free and cached", self._victims, len(self._victims), cached=True)
        for step, waiting in self._pending.items():
            if step <= self.retired:
                raise IntegrityError("a retired step still holds blocks back", field="step", got=step)
            live = [b[self._place[b] == tickets].tolist() for b, tickets in waiting]
            self._claim(state, "pending", [block for blocks in live for block in blocks])
        self._claim(state, "in use", self.refs.nonzero()[0].tolist())
        for block, (found, count) in enumerate(zip(state, self.refs.tolist(), strict=True)):
            held = holders.get(block, 0) if holders is not None else count
            if found is None or count != held or count < 0:
                raise IntegrityError(
                    "a block is in no state, or its holders are miscounted",
                    field="block",
                    got=f"{block}: {found}, counted {count}",
                    allowed=held,
                )
        counted = state.count("pending")
        if counted != self._num_pending:
            raise IntegrityError(
                "pending blocks are miscounted", field="pending", got=self._num_pending, allowed=counted
            )

    def _claim(
        self,
        state: list[str | None],
        name: str,
        blocks: Iterable[int],
        counted: int | None = None,
        cached: bool | None = None,
    ) -> None:
        number = 0
        for block in blocks:
            number += 1
            if state[block] is not None or (cached is not None and bool(self._cached[block]) != cached):
                raise IntegrityError(
                    "a block is in two states", field="block", got=f"{block}: {state[block]} and {name}"
                )
            state[block] = name
        if counted is not None and number != counted:
            raise IntegrityError(f"blocks are miscounted: {name}", field="blocks", got=counted, allowed=number)
