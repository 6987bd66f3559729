"""`StoredWeights`: the bytes of a model's weights, and what one rank holds of them. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcore.models.parameters.stored import Choice, stored_bytes
from kvcore.models.parameters.weight import ModelWeights, Weight
from kvcore.spec.dtypes import ceil_div


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint.

    Attributes:
        total: Bytes of all of them.
        source: What told it, for people.
        model: Them one by one, where a formula knows them.
        dtype: Element type of those that no quantizer packed.
        packing: How a quantizer packed the others.
    """

    total: int
    source: str
    model: ModelWeights | None = None
    dtype: str = "bfloat16"
    packing: Choice | None = None

    @classmethod
    def by_formula(cls, model: ModelWeights, dtype: str, packing: Choice) -> StoredWeights:
        """As a formula tells them."""
        counted = cls(0, "the parameters that config.json describes", model, dtype, packing)
        return cls(counted._formula_total, counted.source, model, dtype, packing)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not counted, or not known."""
        return () if self.model is None else self.model.notes

    def on_rank(self, layers: Collection[int], stage: int, stages: int, tensor: int) -> int:
        """Bytes on one rank.

        Where another source than the formula tells the total, the formula tells the share; without a formula the
        ranks share evenly.

        Args:
            layers: Decoder layers of its stage.
            stage: Which stage, of `stages`.
            stages: Pipeline stages.
            tensor: Tensor ranks.
        """
        if self.model is None:
            return ceil_div(self.total, stages * tensor)
        parts = [self._layers(tensor)[i] for i in layers]
        if stage == 0:
            parts.append(self._bytes("model", self.model.first, tensor))
        if stage == stages - 1:
            parts.append(self._bytes("model", self.model.last, tensor))
            if self.model.tied and stages > 1:
                parts.append(self._bytes("model", self.model.first[:1], tensor))
        return ceil_div(sum(parts) * self.total, max(self._formula_total, 1))

    def _layers(self, tensor: int) -> list[int]:
        if tensor not in self._by_ranks:
            layers = () if self.model is None else self.model.layers
            self._by_ranks[tensor] = [self._bytes(f"model.layers.{i}", layer, tensor) for i, layer in enumerate(layers)]
        return self._by_ranks[tensor]

    def _bytes(self, where: str, weights: Sequence[Weight], tensor: int) -> int:
        return sum(self._share(where, w, tensor) for w in weights)

    def _share(self, where: str, weight: Weight, tensor: int) -> int:
        named = weight if where == "model" else weight._replace(name=f"{where}.{weight.name}")
        whole = stored_bytes(named, self.dtype, self.packing or (lambda _: None))
        return weight.share(whole, tensor)

    @cached_property
    def _by_ranks(self) -> dict[int, list[int]]:
        return {}

    @cached_property
    def _formula_total(self) -> int:
        if self.model is None:
            return self.total
        outside = self._bytes("model", (*self.model.first, *self.model.last), 1)
        return outside + sum(self._layers(1))
