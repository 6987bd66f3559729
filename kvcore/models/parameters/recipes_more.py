"""Recipes of the model types that are planned alone (`kvcore.models.families.unproven`)."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.models.config_json import Fields
from kvcore.models.parameters.attention import Switch, latent, softmax
from kvcore.models.parameters.feed_forward import (
    FeedForward,
    both,
    either,
    every,
    experts,
    from_layer,
    gated,
    listed,
    plain,
    shared,
    times,
)
from kvcore.models.parameters.recipe import Recipe
from kvcore.models.parameters.weight import Weights, norm, vector, width
from kvcore.models.parts import CachePart, Heads

BIASED = "attention_bias"


def with_vector(inner: FeedForward, name: str, length: str | int) -> FeedForward:
    """A feed-forward layer and a vector: as many numbers as a field says, or as are given."""

    def weights(fields: Fields, index: int) -> Weights:
        return inner(fields, index) + vector(
            name, width(fields, *fields.names(length)) if isinstance(length, str) else length
        )

    return weights


def differential(fields: Fields, part: CachePart) -> Weights:
    """DiffLlama: four vectors of a head's dimension weigh two attentions against each other."""
    found = softmax(BIASED)(fields, part)
    return found + (vector("self_attn.lambdas", 4 * part.head_dim) if isinstance(part, Heads) else [])


def normed_output(fields: Fields, part: CachePart) -> Weights:
    """BitNet: a norm before the output projection."""
    found = softmax(BIASED)(fields, part)
    return found + (norm("self_attn.attn_sub_norm", fields.integer("hidden_size")) if isinstance(part, Heads) else [])


def mixture(number: str, shares: str, bias: Switch = False) -> FeedForward:
    """Experts, and one for all tokens that is so many of them in one."""
    return both(experts(number=number), shared(times(shares, "moe_intermediate_size"), bias))


def sparse(number: str, shares: str, bias: Switch = False) -> FeedForward:
    """Dense layers first, then mixtures with shared experts."""
    return either(
        listed(otherwise=from_layer("first_k_dense_replace")), mixture(number, shares, bias), gated(bias=bias)
    )


def post_norms(fields: Fields, index: int) -> int:
    """Two more where `use_post_norm` asks for them."""
    return 4 if fields.flag("use_post_norm") else 2


def normed(fields: Fields, index: int) -> Weights:
    """BitNet: a gated layer with a norm of its inner width."""
    return gated()(fields, index) + norm("mlp.ffn_sub_norm", width(fields, "intermediate_size"))


def after_first(fields: Fields, index: int) -> bool:
    """Experts in all layers but the first."""
    return index > 0


QK_SWITCH = softmax(BIASED, False, qk_norm="head", qk_switch="use_qk_norm")
ROUTED = mixture("n_routed_experts", "n_shared_experts")
ARIA = both(
    experts("intermediate_size", "moe_num_experts"),
    shared(times("moe_num_shared_experts", "intermediate_size"), "mlp_bias"),
)
SHARED_WIDTH = both(experts(), shared("shared_expert_intermediate_size"))

MORE_RECIPES: Mapping[str, Recipe] = {
    "afmoe": Recipe(
        (softmax(BIASED, qk_norm="head", gate="full"),),
        either(
            from_layer("num_dense_layers"),
            with_vector(mixture("num_experts", "num_shared_experts"), "mlp.expert_bias", "num_experts"),
            gated(),
        ),
        norms=4,
    ),
    "apertus": Recipe((softmax(BIASED, qk_norm="head"),), with_vector(plain(bias="mlp_bias"), "mlp.act_fn", 2)),
    "apertus1p5_text": Recipe((softmax(BIASED, qk_norm="head"),), with_vector(plain(bias="mlp_bias"), "mlp.act_fn", 2)),
    "arcee": Recipe((softmax(BIASED),), plain(bias="mlp_bias")),
    "aria_text": Recipe((softmax(BIASED),), ARIA),
    "axk1": Recipe(
        (latent(),), either(listed(otherwise=after_first), with_vector(ROUTED, "mlp.post_norm", "hidden_size"), gated())
    ),
    "bitnet": Recipe((normed_output,), normed),
    "cwm": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "diffllama": Recipe((differential,), gated(bias="mlp_bias")),
    "exaone": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "flex_olmo": Recipe((softmax(BIASED, qk_norm="whole"),), experts("intermediate_size")),
    "granite_swa": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "granitemoe_swa": Recipe((softmax(BIASED),), experts("intermediate_size", "num_local_experts")),
    "helium": Recipe((softmax(BIASED, False),), gated(bias="mlp_bias")),
    "hunyuan_v1_dense": Recipe((softmax(BIASED, qk_norm="head"),), gated()),
    "hy_v3": Recipe((softmax(BIASED, qk_norm="head"),), sparse("num_experts", "num_shared_experts", "mlp_bias")),
    "hyperclovax": Recipe((softmax(BIASED),), gated(bias="mlp_bias"), norms=post_norms),
    "internlm3": Recipe((softmax("qkv_bias", "bias"),), gated(bias="bias")),
    "iquestcoder": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "jais2": Recipe((softmax(BIASED),), plain(bias="mlp_bias"), norm_bias=True),
    "kolibri1": Recipe((softmax(qk_norm="head"),), SHARED_WIDTH, norms=4),
    "laguna": Recipe(
        (softmax(BIASED, qk_norm="head", gate="head"),),
        either(listed(otherwise=after_first), with_vector(SHARED_WIDTH, "mlp.correction", "num_experts"), gated()),
    ),
    "mellum": Recipe((softmax(BIASED, qk_norm="head"),), either(listed(otherwise=every), experts(), gated())),
    "nanochat": Recipe((softmax(BIASED),), plain(), norms=0, last_norm=False),
    "nemotron": Recipe((softmax(BIASED),), plain(bias="mlp_bias"), norm_bias=True),
    "persimmon": Recipe(
        (softmax(True, qk_norm="head", qk_switch="qk_layernorm", qk_bias=True),), plain(bias=True), norm_bias=True
    ),
    "phimoe": Recipe(
        (softmax(BIASED),), experts("intermediate_size", "num_local_experts"), norm_bias=True, head_bias="lm_head_bias"
    ),
    "sarvam_mla": Recipe((latent(),), sparse("n_routed_experts", "n_shared_experts")),
    "sarvam_moe": Recipe((QK_SWITCH,), sparse("n_routed_experts", "n_shared_experts")),
    "solar_open": Recipe((QK_SWITCH,), ROUTED),
    "vaultgemma": Recipe((softmax(BIASED),), gated()),
    "youtu": Recipe((latent(),), gated(bias="mlp_bias")),
}
