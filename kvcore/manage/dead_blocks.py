"""`DeadBlocks`: the blocks whose content died since the last step, for whoever poisons them."""

from __future__ import annotations

from collections.abc import Sequence

GroupBlocks = tuple[tuple[int, int], ...]


class DeadBlocks:
    """Remembers to which group each block was given last: its bytes are poisoned as that group's.

    Args:
        num_blocks: Block ids, the null block included.
        enabled: False keeps nothing and costs nothing.
    """

    def __init__(self, num_blocks: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self._writer = [0] * num_blocks if enabled else []
        self._dead: list[tuple[int, int]] = []

    def died(self, block: int) -> None:
        """The content of a block can no longer be read nor hit; see `BlockPool`."""
        if self.enabled:
            self._dead.append((self._writer[block], block))

    def drain(self, new_blocks: Sequence[tuple[int, int]]) -> GroupBlocks:
        """(group, block) that died since the last call, oldest first; then `new_blocks` have new owners.

        Args:
            new_blocks: (group, block) handed out in the step that is being made.
        """
        if not self.enabled:
            return ()
        dead, self._dead = tuple(self._dead), []
        for group, block in new_blocks:
            self._writer[block] = group
        return dead
