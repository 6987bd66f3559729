"""`DeadBlocks`: the blocks whose content died since the last step, for whoever poisons them."""

from __future__ import annotations

import numpy as np

from kvcore.manage.ragged import Ints

_NONE: Ints = np.zeros((0, 2), np.int32)


class DeadBlocks:
    """Remembers to which group each block was given last: its bytes are poisoned as that group's.

    Args:
        num_blocks: Block ids, the null block included.
        enabled: False keeps nothing and costs nothing.
    """

    def __init__(self, num_blocks: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self._writer: Ints = np.zeros(num_blocks if enabled else 0, np.int32)
        self._dead: list[Ints] = []

    def died(self, blocks: Ints) -> None:
        """The content of blocks can no longer be read nor hit; see `BlockPool`."""
        if self.enabled:
            self._dead.append(np.stack((self._writer[blocks], blocks), axis=1).astype(np.int32))

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
