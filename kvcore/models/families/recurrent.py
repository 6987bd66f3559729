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
from kvcore.models.facts import CacheChoice, ModelAdapter
from kvcore.models.families.base import MODEL_DTYPES, FamilyAdapter, Heads, Part, Recurrent
from kvcore.models.families.latent import head_dim, latent_part

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

    def kinds(self, fields: Fields) -> list[str]:
        """What each layer keeps: from `layer_types` or its older names, else by the family's rule."""
        listed = fields.listing("layer_types") or fields.listing("layers_block_type")
        if listed is None:
            return [self.default_kind(fields, i) for i in range(fields.layers)]
        unknown = sorted({str(k) for k in listed if not isinstance(k, str) or k not in KINDS})
        if unknown:
            raise ModelError("unknown kind of layer", field="layer_types", got=unknown, allowed=sorted(KINDS))
        return [KINDS[k] for k in listed]

    @abstractmethod
    def default_kind(self, fields: Fields, index: int) -> str:
        """What a layer keeps where the config does not list it."""

    @abstractmethod
    def state(self, fields: Fields) -> Recurrent:
        """The state of one layer."""

    def attention(self, fields: Fields, cache: CacheChoice) -> Part:
        """The attention of one layer."""
        return Heads(fields.heads, fields.kv_heads, fields.head_dim)

    def num_layers(self, fields: Fields) -> int:
        """As many as are listed."""
        return len(self.kinds(fields))

    def layer(self, fields: Fields, index: int, cache: CacheChoice) -> Iterable[Part]:
        """The state before the attention, as the modules run them."""
        kind = self.kinds(fields)[index]
        if kind in (STATE, BOTH):
            yield self.state(fields)
        if kind in (ATTENTION, BOTH):
            yield self.attention(fields, cache)


def state_dtype(fields: Fields) -> str | None:
    """Element type of the recurrence where the config names one; None is the model's."""
    name = fields.get("mamba_ssm_dtype", fields.get("mamba_ssm_cache_dtype"))
    if name is not None and name not in MODEL_DTYPES:
        raise ModelError("unknown element type of a state", field="mamba_ssm_dtype", got=name, allowed=MODEL_DTYPES)
    return None if name is None else str(name)


def conv_and_ssm(fields: Fields, channels: int, width: int, shape: tuple[int, ...]) -> Recurrent:
    """`conv_state` [channels, width - 1] and `ssm_state` of the given shape."""
    if width < 2:
        raise ModelError("the convolution has no history", field="conv_kernel", got=width, allowed=">= 2")
    return Recurrent((("conv_state", (channels, width - 1), None), ("ssm_state", shape, state_dtype(fields))))


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
        return conv_and_ssm(fields, inner, fields.integer("conv_kernel", 4), (inner, states))


class Jamba(Hybrid):
    """Jamba: attention in one layer of every `attn_layer_period`."""

    model_types = ("jamba",)

    def default_kind(self, fields: Fields, index: int) -> str:
        """Attention at the offset of each period."""
        period, offset = (fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4, least=0))
        return ATTENTION if index % period == offset else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[inner, w - 1] and [inner, N]."""
        inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
        return conv_and_ssm(
            fields, inner, fields.integer("mamba_d_conv", 4), (inner, fields.integer("mamba_d_state", 16))
        )


class Mamba2(Hybrid):
    """Mamba-2 and its hybrids; subclasses say where the fields lie.

    Attributes:
        names: Fields of heads, head dimension, state size, groups and convolution width, with defaults.
    """

    model_types = ("mamba2",)
    names: ClassVar[tuple[tuple[str, int], ...]] = (
        ("num_heads", 128),
        ("head_dim", 64),
        ("state_size", 128),
        ("n_groups", 8),
        ("conv_kernel", 4),
    )

    def default_kind(self, fields: Fields, index: int) -> str:
        """State."""
        return STATE

    def state(self, fields: Fields) -> Recurrent:
        """[inner + 2 G N, w - 1] and [heads, head_dim, N]."""
        heads, dim, states, groups, width = (fields.integer(n, d) for n, d in self.names)
        return conv_and_ssm(fields, heads * dim + 2 * groups * states, width, (heads, dim, states))


class Zamba2(Mamba2):
    """Zamba2: state in every layer; some also apply a shared block of attention over twice the width."""

    model_types = ("zamba2",)

    def state(self, fields: Fields) -> Recurrent:
        """The head dimension follows from the width and the number of heads."""
        inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
        heads = fields.integer("n_mamba_heads", 8)
        states, groups = fields.integer("mamba_d_state", 64), fields.integer("mamba_ngroups", 1)
        width = fields.integer("mamba_d_conv", 4)
        return conv_and_ssm(fields, inner + 2 * groups * states, width, (heads, inner // heads, states))

    def kinds(self, fields: Fields) -> list[str]:
        """Layers of kind ``hybrid`` keep both; `hybrid_layer_ids` lists them in older configs."""
        ids = fields.listing("hybrid_layer_ids")
        if fields.get("layers_block_type") is None and fields.get("layer_types") is None and ids is not None:
            return [BOTH if i in ids else STATE for i in range(fields.layers)]
        return super().kinds(fields)

    def attention(self, fields: Fields, cache: CacheChoice) -> Part:
        """Heads over the concatenation of hidden states and embeddings."""
        heads = fields.heads
        dim = fields.integer("attention_head_dim", 2 * fields.integer("hidden_size") // heads)
        return Heads(heads, fields.kv_heads, dim, scale=(dim / 2) ** -0.5)


class NemotronH(Mamba2):
    """Nemotron-H: Mamba-2, attention and feed-forward are layers of their own."""

    model_types = ("nemotron_h",)
    names = (
        ("mamba_num_heads", 128),
        ("mamba_head_dim", 64),
        ("ssm_state_size", 128),
        ("n_groups", 8),
        ("conv_kernel", 4),
    )

    def kinds(self, fields: Fields) -> list[str]:
        """One letter a layer in `hybrid_override_pattern`, else listed."""
        pattern = fields.get("hybrid_override_pattern")
        if fields.get("layers_block_type") is not None or fields.get("layer_types") is not None:
            return super().kinds(fields)
        if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
            raise ModelError(
                "config.json does not say which layers keep what",
                field="hybrid_override_pattern",
                got=pattern,
                allowed="a text of M, *, - and E",
            )
        return [KINDS[letter] for letter in pattern]


class Granite(Mamba2):
    """Granite-4 hybrid: `layer_types` lists mamba and attention."""

    model_types = ("granitemoehybrid",)
    names = (
        ("mamba_n_heads", 128),
        ("mamba_d_head", 64),
        ("mamba_d_state", 256),
        ("mamba_n_groups", 1),
        ("mamba_d_conv", 4),
    )

    def attention(self, fields: Fields, cache: CacheChoice) -> Part:
        """The scale is a field of the config."""
        scale = fields.number("attention_multiplier", 1.0)
        return Heads(fields.heads, fields.kv_heads, fields.head_dim, scale=scale)


class Bamba(Mamba2):
    """Bamba: `attn_layer_indices` lists the attention layers."""

    model_types = ("bamba",)
    names = Granite.names

    def default_kind(self, fields: Fields, index: int) -> str:
        """Attention where listed."""
        return ATTENTION if index in (fields.listing("attn_layer_indices") or ()) else STATE


class FalconH1(Mamba2):
    """Falcon-H1: state and attention side by side in every layer."""

    model_types = ("falcon_h1",)
    names = Granite.names

    def default_kind(self, fields: Fields, index: int) -> str:
        """Both."""
        return BOTH

    def kinds(self, fields: Fields) -> list[str]:
        """Both in every layer; its config lists kinds for its cache class only."""
        return [BOTH] * fields.layers


class GatedDeltaNet(Hybrid):
    """Qwen3-Next and Qwen3.5: a gated delta net in three of four layers."""

    model_types = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")

    def default_kind(self, fields: Fields, index: int) -> str:
        """Attention in every `full_attention_interval`-th layer."""
        return ATTENTION if (index + 1) % fields.integer("full_attention_interval", 4) == 0 else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[2 Hk Dk + Hv Dv, w - 1] and [Hv, Dk, Dv]."""
        keys, values = (fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32))
        key_dim, value_dim = (fields.integer(f"linear_{n}_head_dim", 128) for n in ("key", "value"))
        channels = 2 * keys * key_dim + values * value_dim
        width = fields.integer("linear_conv_kernel_dim", 4)
        return conv_and_ssm(fields, channels, width, (values, key_dim, value_dim))

    def attention(self, fields: Fields, cache: CacheChoice) -> Part:
        """Heads of 256 where the config is silent."""
        return Heads(fields.heads, fields.kv_heads, fields.integer("head_dim", 256))


class KimiLinear(Hybrid):
    """Kimi-Linear: delta attention in three of four layers, latent attention in the others."""

    model_types = ("kimi_linear", "kimi_k3")

    def kinds(self, fields: Fields) -> list[str]:
        """`linear_attn_config` lists layers from 1 on."""
        full = fields.section("linear_attn_config").listing("full_attn_layers")
        if full:
            return [ATTENTION if i + 1 in full else STATE for i in range(fields.layers)]
        return super().kinds(fields)

    def default_kind(self, fields: Fields, index: int) -> str:
        """Every fourth layer but the first."""
        return ATTENTION if index and index % 4 == 0 else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[3 H D, w - 1] and [H, D, D]."""
        options = fields.section("linear_attn_config")
        heads = options.integer("num_heads", fields.integer("linear_num_heads", 32))
        dim = options.integer("head_dim", fields.integer("linear_head_dim", 128))
        width = options.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4))
        return conv_and_ssm(fields, 3 * heads * dim, width, (heads, dim, dim))

    def attention(self, fields: Fields, cache: CacheChoice) -> Part:
        """Latent attention with the usual scale."""
        return latent_part(fields, float(head_dim(fields) ** -0.5), cache)


class ShortConv(Hybrid):
    """LFM2: gated short convolutions beside attention."""

    model_types = ("lfm2", "lfm2_moe")

    def default_kind(self, fields: Fields, index: int) -> str:
        """`full_attn_idxs` lists the attention layers; without it all are."""
        listed = fields.listing("full_attn_idxs")
        return ATTENTION if listed is None or index in listed else STATE

    def state(self, fields: Fields) -> Recurrent:
        """[hidden, w - 1] and no recurrence."""
        width = fields.integer("conv_L_cache", 3, least=2)
        return Recurrent((("conv_state", (fields.integer("hidden_size"), width - 1), None),))


ADAPTERS: tuple[type[ModelAdapter], ...] = (
    Mamba1,
    Jamba,
    Mamba2,
    Zamba2,
    NemotronH,
    Granite,
    Bamba,
    FalconH1,
    GatedDeltaNet,
    KimiLinear,
    ShortConv,
)
