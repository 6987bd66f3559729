"""`Recipe`: what the layers of a model type are made of, and the weights of a config by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.models.config_json import Fields
from kvcore.models.parameters.attention import Mixer, Switch, switched
from kvcore.models.parameters.feed_forward import FeedForward
from kvcore.models.parameters.weight import ModelWeights, Weight, Weights, matrix, norm, vector
from kvcore.models.parts import CachePart

Outside = Callable[[Fields], Weights]
Norms = int | Callable[[Fields, int], int]


@dataclass(frozen=True)
class Recipe:
    """The weights of a decoder, as functions of its config.

    Attributes:
        mixers: Of each part of a layer (heads, latents, states), the weights; each answers for its own kind.
        feed_forward: What follows, or None.
        norms: Norms of the model's width in a layer.
        norm_bias: Whether norms shift as well as scale.
        last_norm: Whether a norm follows the last layer.
        head_bias: Whether the output has a bias.
        positions: Rows of a table of learned positions.
        extra: More weights outside the layers.
        tied: Whether the output is the embeddings.
        embedding: Width of the embeddings; None is the model's.
    """

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    norms: Norms = 2
    norm_bias: Switch = False
    last_norm: bool = True
    head_bias: Switch = False
    positions: Callable[[Fields], int] | None = None
    extra: Outside | None = None
    tied: Switch = "tie_word_embeddings"
    embedding: Callable[[Fields], int] | None = None

    def weights(self, fields: Fields, layers: Sequence[Sequence[CachePart]]) -> ModelWeights:
        """The weights of a config.

        Args:
            fields: Its fields.
            layers: The parts of each decoder layer, as the adapter describes them.

        Raises:
            ModelError: A width is missing that decides over gigabytes.
        """
        d, vocabulary = fields.integer("hidden_size"), fields.integer("vocab_size")
        shifted = switched(fields, self.norm_bias)
        wide = d if self.embedding is None else self.embedding(fields)
        first = [Weight("model.embed_tokens", (vocabulary, wide), parts=vocabulary)]
        if self.positions is not None:
            first.append(Weight("model.embed_positions", (self.positions(fields), d)))
        first += [] if self.extra is None else self.extra(fields)
        last = norm("model.norm", d, shifted) if self.last_norm else []
        tied, head_bias = self._tied(fields), switched(fields, self.head_bias)
        if not tied:
            last += matrix("lm_head", vocabulary, wide, bias=head_bias, parts=vocabulary)
        elif head_bias:
            last += vector("lm_head.bias", vocabulary, parts=vocabulary)
        made = tuple(tuple(self._layer(fields, i, parts, d, shifted)) for i, parts in enumerate(layers))
        return ModelWeights(tuple(first), made, tuple(last), tied)

    def _tied(self, fields: Fields) -> bool:
        """A model of several modalities says it for its text part, where it says it at all."""
        if isinstance(self.tied, str) and fields.outer is not fields.inner and self.tied in fields.outer:
            return Fields(fields.outer, nested=False).flag(self.tied)
        return switched(fields, self.tied)

    def _layer(self, fields: Fields, index: int, parts: Sequence[CachePart], d: int, shifted: bool) -> Weights:
        count = self.norms if isinstance(self.norms, int) else self.norms(fields, index)
        found = [w for i in range(count) for w in norm(f"norm_{i}", d, shifted)]
        for part in parts:
            for mixer in self.mixers:
                found += mixer(fields, part)
        return found if self.feed_forward is None else found + self.feed_forward(fields, index)
