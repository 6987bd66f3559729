"""`BlockPool`: who holds each block id, and which one is handed out next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvcore.errors import ConfigError, IntegrityError, OutOfBlocksError
from kvcore.manage.block_list import BlockList
from kvcore.manage.eviction import LRU, EvictionPolicy
from kvcore.plan.config import NULL_BLOCK

_NOT_PENDING = -1


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
        policy: Class of the eviction policy.
        on_evict: Called with a cached block that is about to be handed out.
        on_death: Called with each block whose content can no longer be read nor hit: when its last reader is
            done, if it is not cached; when it is evicted; when the cache forgets it.

    Attributes:
        refs: Holders of each id; read only.
        retired: The last step known to be done.
        evictions: Cached blocks that were handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: type[EvictionPolicy] = LRU,
        on_evict: Callable[[int], None] | None = None,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(
                "a pool holds at least the null block", field="num_blocks", got=num_blocks, allowed=">= 1"
            )
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.retired = 0
        self.evictions = 0
        self._on_evict = on_evict
        self._on_death = on_death
        self._fresh = BlockList(num_blocks, full=True)  # free, content of no use
        self._policy = policy(num_blocks)  # free, content can be hit
        self._cached = bytearray(num_blocks)
        self._last_reader = [0] * num_blocks
        # Pending blocks by last reader, in the order of their release. An entry counts only while
        # `_pending_at` points back at it: a block can be revived, and released again later.
        self._pending: dict[int, list[int]] = {}
        self._pending_at = [_NOT_PENDING] * num_blocks
        self._num_pending = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._fresh) + len(self._policy)

    @property
    def num_reusable(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._policy)

    @property
    def num_pending(self) -> int:
        """Blocks without a holder that wait for a step to retire."""
        return self._num_pending

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - 1 - self.num_free - self._num_pending

    def is_free(self, block: int) -> bool:
        """Whether `share` of this block would leave one less to hand out."""
        return self.refs[block] == 0 and self._pending_at[block] == _NOT_PENDING

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one holder.

        Raises:
            OutOfBlocksError: Fewer are free; nothing has changed.
        """
        if count > self.num_free:
            raise OutOfBlocksError(
                "not enough free blocks",
                field="blocks",
                got=count,
                allowed=f"<= {self.num_free}",
                remedy="free or preempt a request, or retire steps that are done",
            )
        taken = []
        fresh, refs, last_reader = self._fresh, self.refs, self._last_reader
        try:
            for _ in range(count):
                block = fresh.pop_first() if len(fresh) else self._evict()
                refs[block] = 1
                last_reader[block] = 0
                taken.append(block)
        except BaseException:  # a policy is anybody's code
            self.release(taken, self.retired)
            raise
        return taken

    def _evict(self) -> int:
        block = self._policy.pop()
        if not (0 < block < self.num_blocks and self._cached[block] and self.is_free(block)):
            raise IntegrityError(
                "the eviction policy gave up a block that it was not given",
                field="cache.eviction",
                got=block,
                remedy=f"repair the policy {type(self._policy).__name__}",
            )
        self._cached[block] = 0
        self.evictions += 1
        if self._on_evict is not None:
            self._on_evict(block)
        if self._on_death is not None:
            self._on_death(block)
        return block

    def _set_free(self, block: int) -> None:
        """Nobody holds or reads the block any more; content that is not cached is dead."""
        if self._cached[block]:
            self._policy.add(block)
            return
        self._fresh.append(block)
        if self._on_death is not None:
            self._on_death(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Give each block one more holder; free and pending ones come back to life."""
        for block in blocks:
            if self.refs[block] == 0:
                self._revive(block)
            self.refs[block] += 1

    def _revive(self, block: int) -> None:
        if block == NULL_BLOCK:
            raise IntegrityError("the null block has no holder", field="block", got=block)
        if self._pending_at[block] != _NOT_PENDING:
            self._pending_at[block] = _NOT_PENDING
            self._num_pending -= 1
        elif self._cached[block]:
            self._policy.remove(block)
        else:
            self._fresh.remove(block)

    def release(self, blocks: Iterable[int], last_reader: int) -> None:
        """Take one holder from each block, in the order in which they should be given up.

        Args:
            blocks: Blocks in use; of a request, the tail first.
            last_reader: The last step that may read them on behalf of this holder.
        """
        for block in blocks:
            left = self.refs[block] - 1
            if left < 0 or block == NULL_BLOCK:
                raise IntegrityError("a block is released that nobody holds", field="block", got=block)
            self.refs[block] = left
            step = self._last_reader[block]
            if last_reader > step:
                self._last_reader[block] = step = last_reader
            if left:
                continue
            if step > self.retired:
                waiting = self._pending.setdefault(step, [])
                self._pending_at[block] = len(waiting)
                waiting.append(block)
                self._num_pending += 1
            else:
                self._set_free(block)

    def retire(self, step: int) -> None:
        """All steps up to `step` are done: their pending blocks can be handed out."""
        if step <= self.retired:
            return
        self.retired = step
        for due in sorted(s for s in self._pending if s <= step):
            for i, block in enumerate(self._pending.pop(due)):
                if self._pending_at[block] == i and self._last_reader[block] == due:
                    self._pending_at[block] = _NOT_PENDING
                    self._num_pending -= 1
                    self._set_free(block)

    def set_cached(self, block: int) -> None:
        """The content of this block, which is in use, can be hit from now on."""
        if self.refs[block] == 0:
            raise IntegrityError("only a block in use becomes cached", field="block", got=block)
        self._cached[block] = 1

    def uncache(self, blocks: Iterable[int]) -> None:
        """The content of these cached blocks is of no use any more, whatever their state."""
        for block in blocks:
            self._cached[block] = 0
            if self.is_free(block):
                self._policy.remove(block)
                self._set_free(block)

    def check_integrity(self, holders: Mapping[int, int] | None = None) -> None:
        """Prove that every id is in exactly one state; O(pool).

        Args:
            holders: Entries of all tables, by block; compared with the reference counts when given.

        Raises:
            IntegrityError: With the first contradiction.
        """
        state: list[str | None] = [None] * self.num_blocks
        state[NULL_BLOCK] = "null"
        self._claim(state, "free", list(self._fresh), cached=False)
        self._claim(state, "free and cached", list(self._policy), cached=True)
        for step, waiting in self._pending.items():
            if step <= self.retired and waiting:
                raise IntegrityError("a retired step still holds blocks back", field="step", got=step)
            live = [b for i, b in enumerate(waiting) if self._pending_at[b] == i]
            self._claim(state, "pending", [b for b in live if self._last_reader[b] == step])
        self._claim(state, "in use", [b for b, count in enumerate(self.refs) if count])
        for block, found in enumerate(state):
            held = holders.get(block, 0) if holders is not None else self.refs[block]
            if found is None or self.refs[block] != held or self.refs[block] < 0:
                raise IntegrityError(
                    "a block is in no state, or its holders are miscounted",
                    field="block",
                    got=f"{block}: {found}, counted {self.refs[block]}",
                    allowed=held,
                )
        counted = sum(1 for s in state if s == "pending")
        if counted != self._num_pending:
            raise IntegrityError(
                "pending blocks are miscounted", field="pending", got=self._num_pending, allowed=counted
            )

    def _claim(self, state: list[str | None], name: str, blocks: Sequence[int], cached: bool | None = None) -> None:
        for block in blocks:
            if state[block] is not None or (cached is not None and bool(self._cached[block]) != cached):
                raise IntegrityError(
                    "a block is in two states", field="block", got=f"{block}: {state[block]} and {name}"
                )
            state[block] = name
