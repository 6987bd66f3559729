"""`ModelFacts`: what a `config.json` says about caches and attention, layer by layer, with no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvcore.attention.query import AttentionQuery
from kvcore.errors import Refusal, UnsupportedModelError
from kvcore.models.parameters.weight import ModelWeights
from kvcore.settings.cache import CacheSettings
from kvcore.spec.cache_spec import CacheId, KVCacheSpec


@dataclass(frozen=True)
class CacheFacts:
    """One cache of one layer.

    Attributes:
        cache_id: Layer and role.
        spec: What it stores and for how long.
        query: The attention that reads it; None for states.
        shares: The cache whose bytes it reads instead of having its own, or None.
    """

    cache_id: CacheId
    spec: KVCacheSpec
    query: AttentionQuery | None
    shares: CacheId | None = None


@dataclass(frozen=True)
class LengthRefusal(Refusal):
    """A refusal that applies only where `engine.max_model_len` is larger than `applies_above`."""

    applies_above: int = -1


@dataclass(frozen=True)
class ModelFacts:
    """Everything that planning and selection need to know of a model.

    Attributes:
        model_type: ``model_type`` of the config.
        architecture: First entry of ``architectures``, or the model type.
        num_layers: Decoder layers.
        max_model_len: The model's own length limit in tokens.
        vocab_size: Entries of the vocabulary, 0 when unknown.
        dtype: Element type of weights and activations after `model.dtype` is applied.
        caches: Every cache, in model order, shared ones included.
        weight_bytes: Bytes of the weights, or None when nothing tells.
        refusals: Why `run` must refuse; empty when it can serve the model at any length.
        eos_token_ids: Ids that end a text, from the config.
        notes: Facts worth telling people, such as an assumption that was made.
        longest: The longest sequence that is served, where `within` was told; the queries hold up to it.
        hidden_size: Width of the model, 0 when unknown.
    """

    model_type: str
    architecture: str
    num_layers: int
    max_model_len: int
    vocab_size: int
    dtype: str
    caches: tuple[CacheFacts, ...]
    weight_bytes: int | None = None
    refusals: tuple[Refusal, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    longest: int | None = None
    hidden_size: int = 0

    def within(self, longest: int) -> ModelFacts:
        """The facts for sequences of at most `longest` tokens: a window that hides none of them is no mask.

        What a cache keeps, and with it its kind, stays as the model says.
        """
        return replace(self, caches=tuple(_within(c, longest) for c in self.caches), longest=longest)

    def refusals_for(self, max_model_len: int) -> tuple[Refusal, ...]:
        """The refusals that apply to an engine of this length limit."""
        return tuple(r for r in self.refusals if not isinstance(r, LengthRefusal) or max_model_len > r.applies_above)

    def require_runnable(self, max_model_len: int) -> None:
        """Raise the first refusal that applies as `UnsupportedModelError`."""
        for refusal in self.refusals_for(max_model_len):
            raise UnsupportedModelError.of(refusal, f"run cannot serve {self.model_type}: {refusal.reason}")

    @property
    def owned(self) -> dict[CacheId, KVCacheSpec]:
        """The caches that own bytes: the input of `plan`."""
        return {c.cache_id: c.spec for c in self.caches if c.shares is None}

    @property
    def shared(self) -> dict[CacheId, CacheId]:
        """The caches that read another's bytes."""
        return {c.cache_id: c.shares for c in self.caches if c.shares is not None}

    @property
    def queries(self) -> dict[CacheId, AttentionQuery]:
        """The attention of every cache that is read by attention."""
        return {c.cache_id: c.query for c in self.caches if c.query is not None}


def _within(cache: CacheFacts, longest: int) -> CacheFacts:
    if cache.query is None:
        return cache
    mask = cache.query.mask.within(longest)
    return cache if mask is cache.query.mask else replace(cache, query=replace(cache.query, mask=mask))


class ModelAdapter(ABC):
    """Reads the configs of one or more model types; plugins add more by `kvcore_model_adapters`.

    Attributes:
        model_types: The ``model_type`` values it understands.
    """

    model_types: ClassVar[tuple[str, ...]]

    @abstractmethod
    def facts(self, config: Mapping[str, Any], *, dtype: str | None, cache: CacheSettings) -> ModelFacts:
        """Facts of a parsed `config.json`.

        Args:
            config: The file's content.
            dtype: `model.dtype`, or None for the checkpoint's own.
            cache: The user's choices.

        Raises:
            ModelError: A field is missing or absurd; names the field, its value and what is allowed.
        """

    def weights(self, config: Mapping[str, Any]) -> ModelWeights | None:
        """The weights that a parsed `config.json` describes, tensor by tensor; None where no formula tells.

        Raises:
            ModelError: A field is missing that decides over their size.
        """
        return None
