"""Decoders whose layers differ: sliding windows or chunks beside full layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvcore.attention.query import Mask
from kvcore.errors import ModelError, Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import FamilyAdapter
from kvcore.models.parts import CachePart, Heads
from kvcore.settings.cache import CacheSettings
from kvcore.spec.cache_spec import CacheId

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class MixedLayers(FamilyAdapter):
    """`layer_types` names the kind of each layer; where it is absent, a rule of the model type does.

    Attributes:
        period: Without `layer_types`, every `period`-th layer is full and the others slide.
    """

    period: ClassVar[int] = 2
    layer_kinds: ClassVar[tuple[str, ...]] = (FULL, SLIDING)

    def default_type(self, fields: Fields, index: int) -> str:
        """Kind of a layer where the config does not list them."""
        return SLIDING if (index + 1) % self.pattern(fields) else FULL

    def pattern(self, fields: Fields) -> int:
        """The period of full layers."""
        name = "sliding_window_pattern"
        return fields.integer(name) if fields.given(name) else fields.integer(name, self.period)

    def layer_type(self, fields: Fields, index: int) -> str:
        """Kind of one layer."""
        listed = self.listed(fields)
        return self.default_type(fields, index) if listed is None else listed[index]

    def listed(self, fields: Fields) -> list[str] | None:
        """The kinds that the config lists."""
        return fields.per_layer("layer_types", self.layer_kinds, fields.layers)

    def check_lists(self, fields: Fields) -> None:
        """Lists that say which layers have rope are checked even where `layer_types` goes before them."""
        self.listed(fields)
        ropeless(fields)

    def mask(self, fields: Fields, index: int) -> Mask:
        """Mask of one layer."""
        kind = self.layer_type(fields, index)
        if kind == SLIDING:
            return Mask(window=fields.integer("sliding_window"))
        return Mask(chunk=fields.integer("attention_chunk_size")) if kind == CHUNKED else Mask()

    def scale(self, fields: Fields) -> float | None:
        """Softmax scale; None is the usual one."""
        return None

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One cache a layer."""
        yield Heads(
            fields.heads, fields.kv_heads, fields.head_dim, mask=self.mask(fields, index), scale=self.scale(fields)
        )


class Ministral(MixedLayers):
    """Every layer slides where there is a window, unless listed otherwise."""

    model_types: ClassVar[tuple[str, ...]] = ("ministral",)

    def default_type(self, fields: Fields, index: int) -> str:
        """Sliding with a window, else full."""
        return FULL if fields.get("sliding_window") is None else SLIDING


class Step(MixedLayers):
    """Step-3.7: layers slide where listed; the list may count the layers that predict further tokens, at its end."""

    model_types = ("step3p7", "step3p5")
    unproven = frozenset({"step3p7", "step3p5"})

    def default_type(self, fields: Fields, index: int) -> str:
        """Full."""
        return FULL

    def listed(self, fields: Fields) -> list[str] | None:
        """The list without the entries of the layers that predict further tokens."""
        padded = fields.layers + fields.integer("num_nextn_predict_layers", 0, least=0)
        whole = fields.listing("layer_types")
        if whole is not None and len(whole) == padded:
            return fields.per_layer("layer_types", self.layer_kinds, padded)
        return super().listed(fields)


class Qwen(MixedLayers):
    """Qwen2, Qwen3: layers from `max_window_layers` on slide, if `use_sliding_window`."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3")

    def mask(self, fields: Fields, index: int) -> Mask:
        """Without the switch no layer slides, whatever `layer_types` says about its rope."""
        return super().mask(fields, index) if fields.flag("use_sliding_window") else Mask()

    def default_type(self, fields: Fields, index: int) -> str:
        """The first `max_window_layers` layers are full."""
        slides = fields.get("sliding_window") is not None
        return SLIDING if slides and index >= fields.integer("max_window_layers", 28, least=0) else FULL


class Qwen2Moe(Qwen):
    """Qwen2-MoE: every second one of the first layers slides, if `use_sliding_window`."""

    model_types = ("qwen2_moe",)

    def default_type(self, fields: Fields, index: int) -> str:
        """Layers 0, 2, ... below `max_window_layers` slide."""
        below = index < fields.integer("max_window_layers", 28, least=0)
        return SLIDING if below and (index + 1) % 2 else FULL


class SmolLM3(MixedLayers):
    """SmolLM3: layers without rope slide, if `use_sliding_window`."""

    model_types = ("smollm3",)

    def default_type(self, fields: Fields, index: int) -> str:
        """Full, unless the window is switched on and the layer has no rope."""
        if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
            return FULL
        return FULL if has_rope(fields, index) else SLIDING


class Every4th(MixedLayers):
    """Cohere2, OLMo3, EXAONE-4: every fourth layer is full."""

    model_types = ("cohere2", "olmo3", "exaone4")
    period = 4


class GptOss(MixedLayers):
    """gpt-oss: every second layer is full; each head has a sink."""

    model_types = ("gpt_oss",)

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One cache a layer, with sinks."""
        yield Heads(
            fields.heads, fields.kv_heads, fields.integer("head_dim", 64), mask=self.mask(fields, index), sinks=True
        )


class Gemma2(MixedLayers):
    """Gemma2: every second layer is full; logits are capped; the scale has its own field."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)

    def scale(self, fields: Fields) -> float | None:
        """``query_pre_attn_scalar ** -0.5``."""
        return float(fields.number("query_pre_attn_scalar", 256) ** -0.5)

    def softcap(self, fields: Fields) -> float | None:
        """The cap; a written null switches it off, silence means the default."""
        return None if fields.get("attn_logit_softcapping") is None else fields.number("attn_logit_softcapping")

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One cache a layer."""
        yield Heads(
            fields.heads,
            fields.kv_heads,
            fields.integer("head_dim", 256),
            mask=self.mask(fields, index),
            scale=self.scale(fields),
            softcap=self.softcap(fields),
        )

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """Bidirectional variants are encoders."""
        if fields.get("use_bidirectional_attention") in (True, "all"):
            yield Refusal("use_bidirectional_attention", True, reason="it attends in both directions")


class Gemma3(Gemma2):
    """Gemma3: every sixth layer is full; no soft-cap unless given."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")
    unproven = frozenset({"gemma3"})
    period = 6

    def softcap(self, fields: Fields) -> float | None:
        """None by default; its module never passes one."""
        return None


class SharedTail(Gemma3):
    """Gemma3n, Gemma4: the last `num_kv_shared_layers` read the last layer of their kind before them."""

    model_types = ("gemma3n_text", "gemma3n")
    unproven = frozenset({"gemma3n"})
    period = 5
    shared_default: ClassVar[int] = 15

    def scale(self, fields: Fields) -> float | None:
        """1: keys and queries are normalized."""
        return 1.0

    def shares(self, fields: Fields, index: int) -> CacheId | None:
        """The cache that a layer of the tail reads, or None for layers with their own."""
        count = fields.integer("num_kv_shared_layers", self.shared_default, least=0)
        first = fields.layers - count
        if not count or index < first:
            return None
        kind = self.layer_type(fields, index)
        owners = fields.once("owners", lambda: {self.layer_type(fields, i): i for i in range(first)})
        if kind not in owners:
            raise ModelError(
                f"layer {index} shares the cache of a {kind} layer, but none comes before the shared ones",
                field="num_kv_shared_layers",
                got=count,
                allowed=f"< {fields.layers}",
            )
        return CacheId(owners[kind])

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One cache a layer, or another's."""
        yield Heads(
            fields.heads,
            self.kv_heads(fields, index),
            self.dim(fields, index),
            mask=self.mask(fields, index),
            scale=self.scale(fields),
            shares=self.shares(fields, index),
            keys_are_values=self.keys_are_values(fields, index),
        )

    def kv_heads(self, fields: Fields, index: int) -> int:
        """KV heads of a layer."""
        return fields.kv_heads

    def dim(self, fields: Fields, index: int) -> int:
        """Head dimension of a layer."""
        return fields.integer("head_dim", 256)

    def keys_are_values(self, fields: Fields, index: int) -> bool:
        """Whether a layer projects no values of its own."""
        return False


class Gemma4(SharedTail):
    """Gemma4: full layers have a larger head dimension and, where K equals V, fewer KV heads."""

    model_types = ("gemma4_text", "gemma4")
    unproven = frozenset({"gemma4"})
    period = 6
    shared_default = 0

    def layer_type(self, fields: Fields, index: int) -> str:
        """The last layer is full, whatever is listed."""
        return FULL if index == fields.layers - 1 else super().layer_type(fields, index)

    def override(self, fields: Fields, index: int, name: str) -> int | None:
        """A field of one layer in `per_layer_config`, as transformers 5 writes it; it wins."""
        layer = fields.once("per layer", lambda: fields.mapping("per_layer_config")).get(str(index))
        return Fields(layer, nested=False).optional(name) if isinstance(layer, dict) else None

    def kv_heads(self, fields: Fields, index: int) -> int:
        """`num_global_key_value_heads` in full layers whose values are their keys."""
        own = self.override(fields, index, "num_key_value_heads")
        if own is not None:
            return own
        if self.keys_are_values(fields, index):
            return fields.integer("num_global_key_value_heads", fields.kv_heads)
        return fields.kv_heads

    def keys_are_values(self, fields: Fields, index: int) -> bool:
        """In full layers, with `attention_k_eq_v`."""
        return self.layer_type(fields, index) == FULL and fields.flag("attention_k_eq_v")

    def dim(self, fields: Fields, index: int) -> int:
        """`global_head_dim` in full layers."""
        own = self.override(fields, index, "head_dim")
        if own is not None:
            return own
        dim = super().dim(fields, index)
        return fields.integer("global_head_dim", 512) if self.layer_type(fields, index) == FULL else dim


class Llama4(MixedLayers):
    """Llama-4: layers with rope see their chunk; every fourth layer sees all, without rope."""

    model_types = ("llama4_text", "llama4")
    unproven = frozenset({"llama4"})
    layer_kinds = (FULL, CHUNKED)

    def default_type(self, fields: Fields, index: int) -> str:
        """Chunked where the layer has rope and a chunk size is given."""
        chunked = fields.get("attention_chunk_size") is not None
        return CHUNKED if has_rope(fields, index) and chunked else FULL


class MiMo(MixedLayers):
    """MiMo-V2-Flash: sliding layers have their own heads, dimensions and sinks."""

    model_types = ("mimo_v2_flash",)

    def default_type(self, fields: Fields, index: int) -> str:
        """`hybrid_layer_pattern` marks sliding layers with 1; else the first and every sixth are full."""
        pattern = fields.per_layer("hybrid_layer_pattern", (0, 1), fields.layers)
        full = index == 0 or (index + 1) % 6 == 0 if pattern is None else not pattern[index]
        return FULL if full else SLIDING

    def check_lists(self, fields: Fields) -> None:
        """Both lists say the same, where both are given."""
        super().check_lists(fields)
        listed, given = self.listed(fields), fields.get("hybrid_layer_pattern") is not None
        if listed is not None and given and listed != [self.default_type(fields, i) for i in range(fields.layers)]:
            raise ModelError(
                "hybrid_layer_pattern and layer_types of config.json disagree",
                field="hybrid_layer_pattern",
                got=fields.get("hybrid_layer_pattern"),
                allowed="1 where layer_types says sliding_attention",
            )

    def mask(self, fields: Fields, index: int) -> Mask:
        """`sliding_window_size` counts the tokens before the query, as transformers reads it."""
        before = fields.optional("sliding_window_size")
        if before is None or self.layer_type(fields, index) == FULL:
            return super().mask(fields, index)
        return Mask(window=before + 1)

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """Heads of the layer's kind."""
        sliding = self.layer_type(fields, index) == SLIDING
        prefix, sinks = ("swa_", "add_swa") if sliding else ("", "add_full")
        dim = fields.integer(f"{prefix}head_dim", fields.integer("head_dim", 192))
        kv_heads = 2 * fields.kv_heads if sliding else fields.kv_heads
        yield Heads(
            fields.integer(f"{prefix}num_attention_heads", fields.heads),
            fields.integer(f"{prefix}num_key_value_heads", kv_heads),
            dim,
            fields.integer(f"{prefix}v_head_dim", fields.integer("v_head_dim", 128)),
            mask=self.mask(fields, index),
            sinks=fields.flag(f"{sinks}_attention_sink_bias", sliding),
        )


def ropeless(fields: Fields) -> list[int] | None:
    """`no_rope_layers`, checked; an empty list is as good as none."""
    return fields.per_layer("no_rope_layers", (0, 1), fields.layers) if fields.get("no_rope_layers") != [] else None


def has_rope(fields: Fields, index: int) -> bool:
    """`no_rope_layers` marks layers WITH rope by 1; by default every fourth layer has none."""
    listed = ropeless(fields)
    if listed:
        return bool(listed[index])
    return (index + 1) % fields.integer("no_rope_layer_interval", 4) != 0


ADAPTERS: tuple[type[ModelAdapter], ...] = (
    Ministral,
    Step,
    Qwen,
    Qwen2Moe,
    SmolLM3,
    Every4th,
    GptOss,
    Gemma2,
    Gemma3,
    SharedTail,
    Gemma4,
    Llama4,
    MiMo,
)
