"""Plain decoders: every layer attends to every earlier token, or all layers share one window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvcore.attention.query import Mask
from kvcore.errors import Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import FamilyAdapter
from kvcore.models.parts import CachePart, Heads
from kvcore.settings.cache import CacheSettings


class FullAttention(FamilyAdapter):
    """Keys and values of every head group, every token, causal."""

    model_types: ClassVar[tuple[str, ...]] = (
        "llama",
        "mistral3",
        "ministral3",
        "gemma",
        "cohere",
        "olmo",
        "olmo2",
        "olmoe",
        "glm",
        "glm4",
        "glm4_moe",
        "seed_oss",
        "minimax_m2",
        "ernie4_5",
        "phi",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "qwen3_vl",
        "qwen3_vl_moe",
        "internlm2",
        "minicpm",
        "baichuan",
    )
    remote = frozenset({"internlm2", "minicpm", "baichuan"})
    unproven = frozenset({"mistral3", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_text", "qwen3_vl_moe_text"})

    def check_lists(self, fields: Fields) -> None:
        """MiniMax-M2 marks each layer as softmax attention by 1; 0 would be another kind."""
        super().check_lists(fields)
        fields.per_layer("attn_type_list", (1,), fields.layers)

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One full cache a layer."""
        yield Heads(fields.heads, fields.kv_heads, fields.head_dim)


class StableLm(FullAttention):
    """StableLM: its modules keep to themselves what the forward pass is called with."""

    model_types = ("stablelm",)

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """The context of a step cannot reach its attention."""
        yield Refusal(
            "model_type", "stablelm", reason="its modules in transformers 5.24 pass no keyword arguments to attention"
        )


class Granite(FullAttention):
    """Granite: the softmax scale is a field of the config."""

    model_types = ("granite", "granitemoe")

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """As a plain decoder, with its own scale."""
        yield Heads(fields.heads, fields.kv_heads, fields.head_dim, scale=fields.number("attention_multiplier", 1.0))


class UniformWindow(FamilyAdapter):
    """Every layer has the window `sliding_window`, where it is not null."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral", "mixtral", "phi3", "starcoder2")
    layer_kinds = ("full_attention", "sliding_attention")

    def window(self, fields: Fields) -> int | None:
        """The window of all layers."""
        return fields.optional("sliding_window")

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One cache a layer, with the window of all."""
        yield Heads(fields.heads, fields.kv_heads, fields.head_dim, mask=Mask(window=self.window(fields)))


class Qwen3Moe(UniformWindow):
    """Qwen3-MoE: the window counts only with `use_sliding_window`."""

    model_types = ("qwen3_moe",)

    def window(self, fields: Fields) -> int | None:
        """`sliding_window` where it is switched on."""
        return super().window(fields) if fields.flag("use_sliding_window") else None


class MiniMaxSparse(FullAttention):
    """MiniMax-M3: plain keys and values; sparse layers score blocks by index keys as well."""

    model_types = ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
    remote = frozenset({"minimax_m3"})
    layer_kinds = ("full_attention", "minimax_m3_sparse")

    def check_lists(self, fields: Fields) -> None:
        """Its section on sparse attention marks layers by 1."""
        super().check_lists(fields)
        sparse = fields.section("sparse_attention_config")
        for name in ("sparse_attention_freq", "sparse_disable_index_value"):
            sparse.per_layer(name, (0, 1), fields.layers)

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """Block-sparse attention is no mask of ours."""
        yield Refusal("sparse_attention_config", "present", reason="its sparse layers choose blocks by an indexer")

    def notes(self, fields: Fields) -> Iterable[str]:
        """What is not counted."""
        yield from super().notes(fields)
        yield "the sparse indexer's own keys are not counted"


ADAPTERS: tuple[type[ModelAdapter], ...] = (FullAttention, StableLm, Granite, UniformWindow, Qwen3Moe, MiniMaxSparse)
