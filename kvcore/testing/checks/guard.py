"""`Guard` and `Snapshot`: a call changed the bytes that it owns and no others, and none of what it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from kvcore.attention.backend import AttentionLayer
from kvcore.attention.batch import Batch
from kvcore.testing.cases.outcome import CheckFailure
from kvcore.testing.checks.scene import Scene
from kvcore.testing.checks.scene_layer import SceneLayer
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


Held = torch.Tensor | np.typing.NDArray[Any]


class Snapshot:
    """A picture of tensors and host arrays, compared after a call.

    Args:
        held: What is held, by the name that a failure gives it.
    """

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = dict(held)
        self._before = {name: _bits(value).copy() for name, value in self._held.items()}

    def unchanged(self, call: str) -> None:
        """Raise `CheckFailure` when something is not what it was before `call`."""
        for name, value in self._held.items():
            if not np.array_equal(_bits(value), self._before[name]):
                raise CheckFailure(f"{call} changed {name}")


def step_snapshot(batch: Batch, layers: Sequence[AttentionLayer]) -> Snapshot:
    """The tensors of a step: its batch on device and host, and what is each layer's own."""
    held = _tensors(batch, "the batch's")
    for i, group in enumerate(batch.groups):
        held |= _tensors(group, f"the batch's group {i},")
    for layer in layers:
        held |= _tensors(layer, f"layer {layer.cache_id}'s")
    return Snapshot(held)


def given_snapshot(tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """The tensors that one call is given."""
    return Snapshot({f"the {name} that it was given": t for name, t in tensors.items()})


def _tensors(owner: Any, words: str) -> dict[str, Held]:
    named = {f"{words} {f.name}": getattr(owner, f.name) for f in fields(owner)}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor | np.ndarray)}


def _bits(value: Held) -> np.typing.NDArray[np.uint8]:
    """The bytes: NaN is equal to itself, and a dtype that numpy lacks is no obstacle."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return np.asarray(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
