"""`Held`: what a cache must hold of a layer's tokens, and the numbers that it stands for."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kvcore.testing.checks.scene_layer import SceneLayer
from kvcore.testing.oracle import stored
from kvcore.testing.oracle.attention import Array


class Held:
    """All tokens of a layer, one sequence after the other; encoded and decoded once, whoever asks.

    Args:
        layer: The layer; what is changed in its numbers afterwards is not seen.
    """

    def __init__(self, layer: SceneLayer) -> None:
        self._content, self._scales = layer.content, layer.scales
        self._dense = {name: np.concatenate(layer.dense(name)) for name in stored.written(layer.content)}

    @cached_property
    def fields(self) -> stored.Fields:
        """Fields [n, *axes] in storage dtypes."""
        return stored.encode(self._content, self._dense, self._scales)

    @cached_property
    def values(self) -> dict[str, Array]:
        """The float64 values [n, K, D] that the fields stand for, by name of `stored.written`."""
        return stored.decode(self._content, self.fields, self._scales)
