"""`Guard`: proof that a call changed the bytes it owns, and no others."""

from __future__ import annotations

import numpy as np

from kvcore.testing.cases.outcome import CheckFailure
from kvcore.testing.checks.scene import Scene, SceneLayer
from kvcore.testing.oracle.layout_bytes import PagedBytes


class Guard:
    """A picture of the whole arena, compared after each call.

    Args:
        scene: The scene; arenas made for large offsets are not pictured, their middle is not to be touched.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._before = None if scene.large else scene.memory().copy()

    def unchanged(self, otherwise: str) -> None:
        """Raise `CheckFailure` when any byte changed."""
        self._compare(None, otherwise)

    def written(self, layer: SceneLayer, slots: list[int]) -> None:
        """Raise `CheckFailure` when a byte outside these slots of this layer changed."""
        if self._before is None:
            return
        allowed = np.zeros(len(self._before), dtype=bool)
        paged = PagedBytes(self._before, self.scene.config)
        for field in layer.content.fields():
            allowed[paged.where(layer.layer.cache_id, field.name, slots)] = True
        self._compare(allowed, f"write to {layer.layer.cache_id} changed bytes outside its slots")
        self._before = self.scene.memory().copy()

    def _compare(self, allowed: np.typing.NDArray[np.bool_] | None, otherwise: str) -> None:
        if self._before is None:
            return
        changed = self.scene.memory() != self._before
        if allowed is not None:
            changed &= ~allowed
        if changed.any():
            raise CheckFailure(f"{otherwise}: {self._place(int(np.argmax(changed)), int(changed.sum()))}")

    def _place(self, byte: int, count: int) -> str:
        """Where a byte lies, in words."""
        config = self.scene.config
        for group in config.kv_cache_groups:
            for block in range(group.num_blocks):
                for cache in group.cache_ids:
                    for start, end in config.footprint(cache, block):
                        if start <= byte < end:
                            null = block < max(1, group.blocks_per_large_page)
                            what = "the null block" if null else f"block {block}"
                            return f"{count} bytes, the first in {what} of {cache} (byte {byte})"
        return f"{count} bytes, the first at byte {byte}, in no block"
