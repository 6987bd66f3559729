"""`Weight`: one tensor of a checkpoint, and how tensor ranks share it. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.spec.dtypes import ceil_div


class Weight(NamedTuple):
    """One tensor, or as many equal ones as there are experts.

    Attributes:
        name: Module path below its layer, such as ``self_attn.q_proj``; below the model for what lies outside.
        shape: (out, in) of a matrix, the length of a vector.
        copies: How many of them there are.
        parts: Pieces that tensor ranks may share out among them; a rank holds ``ceil(parts / ranks)``, so that 1 is
            a tensor that every rank holds whole, and K heads on 2 K ranks are one head each.
        linear: Whether it is the matrix of a linear layer, which quantizers store in fewer bits.
    """

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    parts: int = 1
    linear: bool = False

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return self.copies * prod(self.shape)

    def share(self, amount: int, ranks: int) -> int:
        """What one of `ranks` tensor ranks holds of `amount` bytes or elements."""
        return ceil_div(amount * ceil_div(self.parts, ranks), self.parts)


Weights = list[Weight]


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model by where they lie.

    Attributes:
        first: Before the layers, with the first pipeline stage: embeddings and the towers of other modalities.
        layers: Each decoder layer.
        last: After them, with the last stage: the last norm and the output.
        tied: Whether the output is the embeddings: a last stage that is not the first needs a copy of them.
        notes: What is not counted, for people.
    """

    first: tuple[Weight, ...]
    layers: tuple[tuple[Weight, ...], ...]
    last: tuple[Weight, ...]
    tied: bool
    notes: tuple[str, ...] = ()

    def named(self) -> Iterable[Weight]:
        """Every weight by its path in the whole model, as the lists of quantizers name modules."""
        yield from self.first
        for index, layer in enumerate(self.layers):
            for weight in layer:
                yield weight._replace(name=f"model.layers.{index}.{weight.name}")
        yield from self.last

    @property
    def count(self) -> int:
        """All parameters; tied ones once."""
        return sum(w.elements for w in chain(self.first, *self.layers, self.last))


def matrix(
    name: str, out: int, into: int, *, bias: bool = False, parts: int = 1, rows: bool = False, copies: int = 1
) -> Weights:
    """A linear layer: its matrix, and its bias where it has one.

    Args:
        name: Path of the module.
        out: Output width.
        into: Input width.
        bias: Whether it adds a vector.
        parts: As in `Weight`.
        rows: Whether ranks share the inputs, not the outputs; each then holds the whole bias.
        copies: As in `Weight`.
    """
    weights = [Weight(name, (out, into), copies, parts, True)]
    return [*weights, Weight(f"{name}.bias", (out,), copies, 1 if rows else parts)] if bias else weights


def vector(name: str, length: int, *, parts: int = 1) -> Weights:
    """A norm, a bias, a scale; none where the length is 0."""
    return [Weight(name, (length,), parts=parts)] if length else []


def norm(name: str, length: int, bias: bool = False) -> Weights:
    """The scale of a norm, and its shift where it has one."""
    return [*vector(name, length), *vector(f"{name}.bias", length if bias else 0)]


def width(fields: Fields, *names: str, least: int = 1) -> int:
    """A width or a count that decides over gigabytes: the first of `names` that the config itself gives.

    A class default would be a guess at another model's size; a null that the class derives is none.

    Raises:
        ModelError: None is given.
    """
    for name in names:
        if fields.given(name):
            return fields.integer(name, least=least)
    raise ModelError(
        f"config.json lacks {names[0]}, and with it the size of the weights",
        field=names[0],
        got=None,
        allowed=f"an integer as {' or '.join(names)}",
        remedy="set model.weight_bytes, or give the cache itself: cache.memory=BYTES",
    )
