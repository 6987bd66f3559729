"""Models with recurrent state: Mamba, Mamba-2, gated delta nets, short convolutions, and their hybrids.

A causal convolution of width w needs the w - 1 inputs before the next token, so `conv_state` holds w - 1
columns (transformers keeps w). Shapes of the recurrence: Mamba (arXiv 2312.00752) [inner, N]; Mamba-2
(arXiv 2405.21060) [heads, head_dim, N]; gated delta rule (arXiv 2412.06464) [value heads, Dk, Dv].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import MODEL_DTYPES, FamilyAdapter
from kvcore.models.families.latent import head_dim, latent_part
from kvcore.models.parts import CachePart, Heads, Recurrent
from kvcore.settings.cache import CacheSettings

ATTENTION, STATE, BOTH, NEITHER = "attention", "state", "both", "neither"
KINDS = {
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "*": ATTENTION,
    "mamba": STATE,
    "mamba2": STATE,
    "linear_attention": STATE,
    "conv": STATE,
    "M": STATE,
    "hybrid": BOTH,
    "mlp": NEITHER,
    "moe": NEITHER,
    "-": NEITHER,
    "E": NEITHER,
}


class Hybrid(FamilyAdapter):
    """A model whose layers keep a state, keys and values, both or neither."""

    layer_kinds: ClassVar[tuple[str, ...]] = (
        "attention",
        "conv",
        "full_attention",
        "hybrid",
        "linear_attention",
        "mamba",
        "mamba2",
        "mlp",
        "moe",
    )

    def kinds(self, fields: Fields) -> list[str]:
        """What each layer keeps: from `layer_types` or its older names, else by the family's rule."""
        return fields.once("kinds", lambda: self.find_kinds(fields))

    def find_kinds(self, fields: Fields) -> list[str]:
        """`kinds`, at its first call."""
        listed = self.listed(fields)
        return [self.default_kind(fields, i) for i in range(fields.layers)] if listed is None else listed

    def listed(self, fields: Fields) -> list[str] | None:
        """What each layer keeps, where the config lists it; its older name counts too."""
        length = fields.optional("num_hidden_layers")
        for name in ("layer_types", "layers_block_type"):
            listed = fields.per_layer(name, self.layer_kinds, length)
            if listed:
                return [KINDS[kind] for kind in listed]
        return None

    def check_lists(self, fields: Fields) -> None:
        """All lists are checked; a list by index says what the list by layer says, where both are given."""
        self.listed(fields)
        by_index = self.by_index(fields)
        if by_index is not None and by_index[1] != self.kinds(fields):
            name = by_index[0]
            raise ModelError(
                f"{name} and the list of layers in config.json disagree",
                field=name,
                got=fields.get(name),
                allowed="the same layers, or one list of the two",
            )

    def by_index(self, fields: Fields) -> tuple[str, list[str]] | None:
        """A field that lists some layers in another form, and what each layer keeps by it; None without one."""
        return None

    @abstractmethod
    def default_kind(self, fields: Fields, index: int) -> str:
        """What a layer keeps where the config does not list it."""

    @abstractmethod
    def state(self, fields: Fields) -> Recurrent:
        """The state of one layer."""

    def attention(self, fields: Fields, cache: CacheSettings) -> CachePart:
        """The attention of one layer."""
        return Heads(fields.heads, fields.kv_heads, fields.head_dim)

    def num_layers(self, fields: Fields) -> int:
        """As many as are listed."""
        return len(self.kinds(fields))

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """The state before the attention, as the modules run them."""
        kind = self.kinds(fields)[index]
        if kind in (STATE, BOTH):
            yield self.state(fields)
        if kind in (ATTENTION, BOTH):
            yield self.attention(fields, cache)


# (heads, width of one): what an axis is made of.
Pairs = tuple[tuple[int, int], ...]


def state_dtype(fields: Fields) -> str | None:
    """Element type of the recurrence where the config names one; None is the model's."""
    name = fields.get("mamba_ssm_dtype", fields.get("mamba_ssm_cache_dtype"))
    if name is not None and name not in MODEL_DTYPES:
        raise ModelError("unknown element type of a state", field="mamba_ssm_dtype", got=name, allowed=MODEL_DTYPES)
    return None if name is None else str(name)


def conv_and_ssm(fields: Fields, channels: Pairs, width: int, shape: tuple[int, ...]) -> Recurrent:
    """`conv_state` [channels, width - 1] and `ssm_state` of the given shape, whose first axis is its heads.

    Args:
        fields: The config.
        channels: (heads, width of one) of everything that is convolved.
        width: Width of the convolution.
        shape: Of the recurrence.
    """
    if width < 2:
        raise ModelError("the convolution has no history", field="conv_kernel", got=width, allowed=">= 2")
    total = sum(heads * each for heads, each in channels)
    tensors = (("conv_state", (total, width - 1), None), ("ssm_state", shape, state_dtype(fields)))
    return Recurrent(tensors, heads=(channels, ((shape[0], 1),)))


class Mamba1(Hybrid):
    """Mamba and Falcon-Mamba: state in every layer."""

    model_types = ("mamba", "falcon_mamba")

    def default_kind(self, fields: Fields, index: int) -> str:
        """State."""
        return STATE

    def state(self, fields: Fields) -> Recurrent:
        """[inner, w - 1] and [inner, N]."""
        inner = fields.integer("intermediate_size", fields.integer("expand", 2) * fields.integer("hidden_size"))
        states = fields.integer("state_size", 16)
        return conv_and_ssm(fields, ((inner, 1),), fields.integer("conv_kernel", 4), (inner, states))


class Jamba(Hybrid):
    """Jamba: attention in one layer of every `attn_layer_period`."""

    model_types = ("jamba",)

    def default_kind(self, fields: Fields, index: int) -> str:
        """Attention at the offset of each period."""
        period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", least=0)
        if offset >= period:
            raise ModelError(
                "attention would be in no layer", field="attn_layer_offset", got=offset, allowed=f"< {period}"
            )
        return ATTENTION if index % period == offset else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[inner, w - 1] and [inner, N]."""
        inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
        return conv_and_ssm(
            fields, ((inner, 1),), fields.integer("mamba_d_conv", 4), (inner, fields.integer("mamba_d_state", 16))
        )


class GatedDeltaNet(Hybrid):
    """Qwen3-Next and Qwen3.5: a gated delta net in three of four layers."""

    model_types = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")

    def default_kind(self, fields: Fields, index: int) -> str:
        """Attention in every `full_attention_interval`-th layer."""
        return ATTENTION if (index + 1) % fields.integer("full_attention_interval", 4) == 0 else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[2 Hk Dk + Hv Dv, w - 1] and [Hv, Dk, Dv]."""
        keys, values = (fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32))
        key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
        channels = ((keys, 2 * key_dim), (values, value_dim))
        width = fields.integer("linear_conv_kernel_dim", 4)
        return conv_and_ssm(fields, channels, width, (values, key_dim, value_dim))

    def attention(self, fields: Fields, cache: CacheSettings) -> CachePart:
        """Heads of 256 where the config is silent."""
        return Heads(fields.heads, fields.kv_heads, fields.integer("head_dim", 256))


class KimiLinear(Hybrid):
    """Kimi-Linear: delta attention in three of four layers, latent attention in the others."""

    model_types = ("kimi_linear", "kimi_k3")

    def find_kinds(self, fields: Fields) -> list[str]:
        """`linear_attn_config` lists layers from 1 on; `layer_types` goes before it."""
        by_index = self.by_index(fields)
        return by_index[1] if by_index and self.listed(fields) is None else super().find_kinds(fields)

    def by_index(self, fields: Fields) -> tuple[str, list[str]] | None:
        """`full_attn_layers` and `kda_layers`, which share the layers out between them."""
        options, layers = fields.section("linear_attn_config"), fields.layers
        full = options.indices("full_attn_layers", layers, first=1)
        delta = options.indices("kda_layers", layers, first=1)
        if full is None and delta is None:
            return None
        if full is None:
            full = frozenset(range(layers)) - (delta or frozenset())
        elif delta is not None and (full & delta or len(full) + len(delta) != layers):
            raise ModelError(
                "full_attn_layers and kda_layers do not share the layers out",
                field="linear_attn_config.full_attn_layers",
                got=sorted(i + 1 for i in full),
                allowed=f"each layer from 1 to {layers} in one of the two lists",
            )
        return "linear_attn_config", [ATTENTION if i in full else STATE for i in range(layers)]

    def default_kind(self, fields: Fields, index: int) -> str:
        """Every fourth layer but the first."""
        return ATTENTION if index and index % 4 == 0 else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[3 H D, w - 1] and [H, D, D]."""
        options = fields.section("linear_attn_config")
        heads = options.optional("num_heads") or fields.integer("linear_num_heads", 32)
        dim = options.optional("head_dim") or fields.integer("linear_head_dim", 128)
        width = options.optional("short_conv_kernel_size") or fields.integer("linear_conv_kernel_dim", 4)
        return conv_and_ssm(fields, ((heads, 3 * dim),), width, (heads, dim, dim))

    def attention(self, fields: Fields, cache: CacheSettings) -> CachePart:
        """Latent attention with the usual scale."""
        return latent_part(fields, float(head_dim(fields) ** -0.5), cache)


class ShortConv(Hybrid):
    """LFM2: gated short convolutions beside attention."""

    model_types = ("lfm2", "lfm2_moe")

    def default_kind(self, fields: Fields, index: int) -> str:
        """`full_attn_idxs` lists the attention layers; without it all are."""
        listed = fields.indices("full_attn_idxs", fields.layers)
        return ATTENTION if listed is None or index in listed else STATE

    def by_index(self, fields: Fields) -> tuple[str, list[str]] | None:
        """`full_attn_idxs`."""
        if fields.get("full_attn_idxs") is None:
            return None
        return "full_attn_idxs", [self.default_kind(fields, i) for i in range(fields.layers)]

    def state(self, fields: Fields) -> Recurrent:
        """[hidden, w - 1] and no recurrence."""
        width = fields.integer("conv_L_cache", 3, least=2)
        hidden = fields.integer("hidden_size")
        return Recurrent((("conv_state", (hidden, width - 1), None),), heads=(((hidden, 1),),))


ADAPTERS: tuple[type[ModelAdapter], ...] = (Mamba1, Jamba, GatedDeltaNet, KimiLinear, ShortConv)
