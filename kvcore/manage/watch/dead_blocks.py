"""`DeadBlocks`: the blocks that were let go or whose content died since the last step, for the sanitizer."""

from __future__ import annotations

import numpy as np

from kvcore.manage.block_pool import BlockPool
from kvcore.manage.ragged import Ints

_NONE: Ints = np.zeros((0, 2), np.int32)


class DeadBlocks:
    """Remembers to which group each block was given last: its bytes are poisoned as that group's.

    Args:
        pool: The blocks.
        enabled: False keeps nothing and costs nothing.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self.enabled = enabled
        self._pool = pool
        self._writer: Ints = np.zeros(pool.num_blocks if enabled else 0, np.int32)
        self._dead: list[Ints] = []
        self._released: list[Ints] = []
        if enabled:
            pool.on_release = self._released.append

    def died(self, blocks: Ints) -> None:
        """The content of blocks can no longer be read nor hit; see `BlockPool`."""
        if self.enabled:
            self._dead.append(self._with_writers(blocks))

    def drain(self, new_blocks: Ints) -> Ints:
        """int32 [n, 2] (group, block) that died since the last call, oldest first; then `new_blocks` have new owners.

        Args:
            new_blocks: [m, 2] (group, block) handed out in the step that is being made.
        """
        if not self.enabled:
            return _NONE
        dead, self._dead = np.concatenate((_NONE, *self._dead)), []
        self._writer[new_blocks[:, 1]] = new_blocks[:, 0]
        return dead

    def drain_released(self) -> Ints:
        """int32 [n, 2] (group, block) that lost their last holder since the last call, and have none now."""
        if not self._released:
            return _NONE
        blocks = np.unique(np.concatenate(self._released))
        self._released.clear()
        return self._with_writers(blocks[self._pool.refs[blocks] == 0])

    def _with_writers(self, blocks: Ints) -> Ints:
        return np.stack((self._writer[blocks], blocks), axis=1).astype(np.int32)
