"""Older decoders: their own field names, ALiBi, one KV head for all queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvcore.errors import Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import FamilyAdapter, unreachable
from kvcore.models.parts import CachePart, Heads
from kvcore.settings.cache import CacheSettings


class EveryHead(FamilyAdapter):
    """GPT-NeoX: as many KV heads as query heads, the usual scale."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer."""
        yield Heads(fields.heads, fields.heads, fields.head_dim)


class GptJ(EveryHead):
    """GPT-J: its rotations are a table of `n_positions` that nothing stretches."""

    model_types = ("gptj",)
    rotary = False


class Opt(EveryHead):
    """OPT: its modules scale the queries themselves."""

    model_types = ("opt",)
    rotary = False

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer; the scale of attention is 1."""
        yield Heads(fields.heads, fields.heads, fields.head_dim, scale=1.0)


class Gpt2(FamilyAdapter):
    """GPT-2: the scale can be switched off, or divided by the layer's number."""

    model_types = ("gpt2",)
    rotary = False

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer."""
        dim = fields.head_dim
        scale = dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
        if fields.flag("scale_attn_by_inverse_layer_idx"):
            scale /= index + 1
        yield Heads(fields.heads, fields.heads, dim, scale=scale)

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """One option has a code path of its own."""
        if fields.flag("reorder_and_upcast_attn"):
            yield Refusal(
                "reorder_and_upcast_attn", True, reason="with this option its attention ignores the attention registry"
            )


class GptBigCode(FamilyAdapter):
    """GPT-BigCode: one KV head with `multi_query`."""

    model_types = ("gpt_bigcode",)
    rotary = False

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer."""
        dim = fields.head_dim
        kv_heads = 1 if fields.flag("multi_query", True) else fields.heads
        scale = None if fields.flag("scale_attn_weights", True) else 1.0
        yield Heads(fields.heads, kv_heads, dim, scale=scale)


class Falcon(FamilyAdapter):
    """Falcon: three generations of KV heads, rope or ALiBi."""

    model_types = ("falcon",)

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer."""
        if fields.flag("new_decoder_architecture"):
            kv_heads = fields.integer("num_kv_heads", fields.kv_heads)
        else:
            kv_heads = 1 if fields.flag("multi_query", True) else fields.heads
        yield Heads(fields.heads, kv_heads, fields.head_dim, alibi=fields.flag("alibi"))

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """Its modules call attention by themselves."""
        yield unreachable("falcon")


class Alibi(FamilyAdapter):
    """BLOOM, MPT: ALiBi."""

    model_types = ("bloom", "mpt")
    rotary = False

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer."""
        options = fields.section("attn_config")
        yield Heads(
            fields.heads,
            options.integer("kv_n_heads", fields.heads),
            fields.head_dim,
            scale=None if options.get("softmax_scale") is None else options.number("softmax_scale"),
            softcap=None,
            alibi=options.flag("alibi", True),
        )

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """Its modules call attention by themselves."""
        yield unreachable(fields.model_type)


ADAPTERS: tuple[type[ModelAdapter], ...] = (EveryHead, GptJ, Opt, Gpt2, GptBigCode, Falcon, Alibi)
