"""Mamba-2 (arXiv 2405.21060) and the hybrids built on it: its state is [heads, head_dim, N]."""

from __future__ import annotations

from typing import ClassVar

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.recurrent import ATTENTION, BOTH, KINDS, NEITHER, STATE, Hybrid, conv_and_ssm
from kvcore.models.parts import CachePart, Heads, Recurrent
from kvcore.settings.cache import CacheSettings


def head_size(fields: Fields, name: str, heads: int) -> int:
    """The dimension of a state's head; ``auto`` divides the inner width by the number of heads.

    Raises:
        ModelError: Heads and inner width disagree where the config gives both.
    """
    inner = fields.optional("mamba_d_ssm")
    expand = fields.optional("mamba_expand") or fields.optional("expand")
    if inner is None and expand is not None:
        inner = expand * fields.integer("hidden_size")
    dim = inner // heads if inner and fields.get(name) == "auto" else fields.integer(name)
    if inner is not None and dim * heads != inner:
        raise ModelError(
            "the heads of the state do not make up its width",
            field=name,
            got=f"{heads} heads of {dim} in {inner}",
            allowed=f"heads of {inner} / {heads}",
        )
    return dim


class Mamba2(Hybrid):
    """Mamba-2 and its hybrids; subclasses say where the fields lie.

    Attributes:
        makes_up_width: Whether heads times head dimension has to be the inner width.
        names: Fields of heads, head dimension, state size, groups and convolution width.
    """

    model_types = ("mamba2",)
    makes_up_width: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")

    def default_kind(self, fields: Fields, index: int) -> str:
        """State."""
        return STATE

    def state(self, fields: Fields) -> Recurrent:
        """[inner + 2 G N, w - 1] and [heads, head_dim, N]."""
        heads_name, dim_name, *rest = self.names
        heads = fields.integer(heads_name)
        dim = head_size(fields, dim_name, heads) if self.makes_up_width else fields.integer(dim_name)
        states, groups, width = (fields.integer(name) for name in rest)
        return conv_and_ssm(fields, ((heads, dim), (groups, 2 * states)), width, (heads, dim, states))


class Zamba2(Mamba2):
    """Zamba2: state in every layer; some also apply a shared block of attention over twice the width."""

    model_types = ("zamba2",)
    layer_kinds = ("hybrid", "linear_attention", "mamba")
    default_layers = 54
    default_ids = (6, 12, 18, 24, 30, 36, 42, 47, 51)

    def state(self, fields: Fields) -> Recurrent:
        """The head dimension follows from the width and the number of heads."""
        inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
        heads = fields.integer("n_mamba_heads", 8)
        states, groups = fields.integer("mamba_d_state", 64), fields.integer("mamba_ngroups", 1)
        width = fields.integer("mamba_d_conv", 4)
        return conv_and_ssm(
            fields, ((heads, inner // heads), (groups, 2 * states)), width, (heads, inner // heads, states)
        )

    def max_model_len(self, fields: Fields) -> int:
        """`use_long_context` replaces the length."""
        return 16384 if fields.flag("use_long_context") else super().max_model_len(fields)

    def find_kinds(self, fields: Fields) -> list[str]:
        """Layers of kind ``hybrid`` keep both; `hybrid_layer_ids` lists them in older configs."""
        listed, by_index = self.listed(fields), self.by_index(fields)
        if listed is None and by_index is None and fields.layers != self.default_layers:
            raise ModelError(
                "config.json does not say which layers keep what",
                field="layers_block_type",
                got=None,
                allowed=f"a kind for each of {fields.layers} layers",
            )
        if listed is None and by_index is not None:
            return by_index[1]
        return super().find_kinds(fields)

    def by_index(self, fields: Fields) -> tuple[str, list[str]] | None:
        """`hybrid_layer_ids`."""
        ids = fields.indices("hybrid_layer_ids", fields.layers)
        return ("hybrid_layer_ids", [BOTH if i in ids else STATE for i in range(fields.layers)]) if ids else None

    def default_kind(self, fields: Fields, index: int) -> str:
        """The list of the class, made for 54 layers."""
        return BOTH if index in self.default_ids else STATE

    def attention(self, fields: Fields, cache: CacheSettings) -> CachePart:
        """Heads over the concatenation of hidden states and embeddings."""
        heads = fields.heads
        dim = 2 * fields.integer("hidden_size") // heads
        if fields.optional("attention_head_dim") not in (None, dim):
            raise ModelError(
                "attention_head_dim in config.json is not twice the width over the heads",
                field="attention_head_dim",
                got=fields.get("attention_head_dim"),
                allowed=dim,
            )
        return Heads(heads, fields.kv_heads, dim, scale=(dim / 2) ** -0.5)


class NemotronH(Mamba2):
    """Nemotron-H: Mamba-2, attention and feed-forward are layers of their own."""

    model_types = ("nemotron_h",)
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    layer_kinds = ("attention", "full_attention", "linear_attention", "mamba", "mlp", "moe")
    makes_up_width = False
    default_kinds = (STATE, NEITHER, ATTENTION, NEITHER)

    def find_kinds(self, fields: Fields) -> list[str]:
        """Listed, else one letter a layer in `hybrid_override_pattern`, else the class's four layers."""
        listed, letters = self.listed(fields), self.by_index(fields)
        if listed is not None:
            return listed
        if letters is not None:
            return letters[1]
        if fields.optional("num_hidden_layers") not in (None, len(self.default_kinds)):
            raise ModelError(
                "config.json does not say which layers keep what",
                field="hybrid_override_pattern",
                got=None,
                allowed="a text of M, *, - and E, one letter for each layer",
            )
        fields.assumed["num_hidden_layers"] = len(self.default_kinds)  # told, since hardly a checkpoint has so few
        return list(self.default_kinds)

    def by_index(self, fields: Fields) -> tuple[str, list[str]] | None:
        """`hybrid_override_pattern`."""
        pattern, layers = fields.get("hybrid_override_pattern"), fields.optional("num_hidden_layers")
        if pattern is None:
            return None
        fits = isinstance(pattern, str) and pattern and not set(pattern) - set("M*-E")
        if not fits or len(pattern) not in (range(1, 10_001) if layers is None else (layers,)):
            raise ModelError(
                "the pattern of layers in config.json is not usable",
                field="hybrid_override_pattern",
                got=pattern,
                allowed=f"a text of M, *, - and E, {'up to 10000 letters' if layers is None else f'{layers} letters'}",
            )
        return "hybrid_override_pattern", [KINDS[letter] for letter in pattern]


class Granite(Mamba2):
    """Granite-4 hybrid: `layer_types` lists mamba and attention."""

    model_types = ("granitemoehybrid",)
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    layer_kinds = ("attention", "full_attention", "linear_attention", "mamba")

    def attention(self, fields: Fields, cache: CacheSettings) -> CachePart:
        """The scale is a field of the config."""
        scale = fields.number("attention_multiplier", 1.0)
        return Heads(fields.heads, fields.kv_heads, fields.head_dim, scale=scale)


class Bamba(Mamba2):
    """Bamba: `attn_layer_indices` lists the attention layers."""

    model_types = ("bamba",)
    names = Granite.names

    def default_kind(self, fields: Fields, index: int) -> str:
        """Attention where listed."""
        return ATTENTION if index in (fields.indices("attn_layer_indices", fields.layers) or ()) else STATE

    def by_index(self, fields: Fields) -> tuple[str, list[str]] | None:
        """`attn_layer_indices`."""
        if fields.indices("attn_layer_indices", fields.layers) is None:
            return None
        return "attn_layer_indices", [self.default_kind(fields, i) for i in range(fields.layers)]


class FalconH1(Mamba2):
    """Falcon-H1: state and attention side by side in every layer."""

    model_types = ("falcon_h1",)
    names = Granite.names
    layer_kinds = ("hybrid",)

    def default_kind(self, fields: Fields, index: int) -> str:
        """Both."""
        return BOTH


ADAPTERS: tuple[type[ModelAdapter], ...] = (Mamba2, Zamba2, NemotronH, Granite, Bamba, FalconH1)
