"""The recipes: which weights each model type has."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.models.config_json import Fields
from kvcore.models.parameters.attention import Switch, indexed, latent, softmax
from kvcore.models.parameters.feed_forward import (
    FeedForward,
    both,
    either,
    experts,
    from_layer,
    gated,
    listed,
    plain,
    shared,
    stepped,
    times,
)
from kvcore.models.parameters.recipe import Recipe
from kvcore.models.parameters.recipes_more import MORE_RECIPES
from kvcore.models.parameters.recipes_own import OWN_RECIPES
from kvcore.models.parameters.states import delta_net, kimi_delta, mamba1, mamba2, short_convolution

BIASED = "attention_bias"


def fourfold(fields: Fields) -> int:
    """Four times the model's width."""
    return 4 * fields.integer("hidden_size")


def inner_or_fourfold(name: str):  # type: ignore[no-untyped-def]
    """A field, or four times the width where it is null."""
    return lambda fields: fields.optional(name) or fourfold(fields)


def positions(fields: Fields) -> int:
    """As many as the model's length."""
    return fields.integer("max_position_embeddings")


def falcon_norms(fields: Fields, index: int) -> int:
    """One where attention and feed-forward run side by side from one norm, else two."""
    if fields.flag("new_decoder_architecture"):
        return fields.optional("num_ln_in_parallel_attn") or 2
    return 1 if fields.flag("parallel_attn", True) else 2


def deepseek(bias: Switch = False) -> FeedForward:
    """Dense layers first, then mixtures whose shared expert is so many of the routed ones in one."""
    mixture = both(experts(number="n_routed_experts"), shared(times("n_shared_experts", "moe_intermediate_size"), bias))
    return either(listed(otherwise=from_layer("first_k_dense_replace")), mixture, gated(bias=bias))


def qwen_moe(mixture: FeedForward) -> FeedForward:
    """Experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    return either(stepped("decoder_sparse_step", but="mlp_only_layers", number="num_experts"), mixture, gated())


QWEN_SHARED = both(experts(), shared("shared_expert_intermediate_size", gate=True, name="mlp.shared_expert"))

RECIPES: Mapping[str, Recipe] = {
    **OWN_RECIPES,
    **MORE_RECIPES,
    "llama": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "mistral": Recipe((softmax(),), gated()),
    "ministral": Recipe((softmax(),), gated()),
    "ministral3": Recipe((softmax(),), gated()),
    "mixtral": Recipe((softmax(),), experts("intermediate_size", "num_local_experts")),
    "internlm2": Recipe((softmax("bias"),), gated()),
    "gemma": Recipe((softmax(BIASED),), gated()),
    "gemma2": Recipe((softmax(BIASED),), gated(), norms=4),
    "gemma3_text": Recipe((softmax(BIASED, qk_norm="head"),), gated(), norms=4),
    "qwen2": Recipe((softmax(True, False),), gated()),
    "qwen2_moe": Recipe((softmax("qkv_bias", False),), qwen_moe(QWEN_SHARED)),
    "qwen3": Recipe((softmax(BIASED, qk_norm="head"),), gated()),
    "qwen3_vl_text": Recipe((softmax(BIASED, qk_norm="head"),), gated()),
    "qwen3_moe": Recipe((softmax(BIASED, qk_norm="head"),), qwen_moe(experts())),
    "qwen3_vl_moe_text": Recipe((softmax(BIASED, qk_norm="head"),), qwen_moe(experts())),
    "qwen3_next": Recipe((softmax(BIASED, qk_norm="head", queries=2), delta_net), qwen_moe(QWEN_SHARED)),
    "qwen3_5_text": Recipe((softmax(BIASED, qk_norm="head", queries=2), delta_net), gated()),
    "qwen3_5_moe_text": Recipe((softmax(BIASED, qk_norm="head", queries=2), delta_net), QWEN_SHARED),
    "phi": Recipe(
        (softmax(True, qk_norm="head", qk_switch="qk_layernorm", qk_bias=True),),
        plain(bias=True),
        norms=1,
        norm_bias=True,
        head_bias=True,
    ),
    "phi3": Recipe((softmax(),), gated()),
    "starcoder2": Recipe((softmax("use_bias"),), plain(bias="use_bias"), norm_bias=True),
    "cohere": Recipe((softmax(BIASED, qk_norm="whole", qk_switch="use_qk_norm"),), gated(), norms=1),
    "cohere2": Recipe((softmax(BIASED),), gated(), norms=1),
    "olmo": Recipe((softmax(BIASED),), gated(), norms=0, last_norm=False),
    "olmo2": Recipe((softmax(BIASED, qk_norm="whole"),), gated()),
    "olmo3": Recipe((softmax(BIASED, qk_norm="whole"),), gated()),
    "olmoe": Recipe((softmax(BIASED, qk_norm="whole"),), experts("intermediate_size")),
    "exaone4": Recipe((softmax(qk_norm="head"),), gated()),
    "glm": Recipe((softmax(BIASED, False),), gated()),
    "glm4": Recipe((softmax(BIASED, False),), gated(), norms=4),
    "glm4_moe": Recipe((softmax(BIASED, False, qk_norm="head", qk_switch="use_qk_norm"),), deepseek()),
    "seed_oss": Recipe((softmax(BIASED, "attention_out_bias"),), gated(bias="mlp_bias")),
    "minimax_m2": Recipe((softmax(qk_norm="whole"),), experts("intermediate_size", "num_local_experts")),
    "ernie4_5": Recipe((softmax("use_bias"),), gated(bias="use_bias")),
    "smollm3": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "granite": Recipe((softmax(BIASED),), gated(bias="mlp_bias")),
    "granitemoe": Recipe((softmax(BIASED),), experts("intermediate_size", "num_local_experts")),
    "gpt_oss": Recipe(
        (softmax(BIASED),), experts("intermediate_size", "num_local_experts", bias=True, router_bias=True)
    ),
    "mimo_v2_flash": Recipe(
        (softmax(BIASED, False),),
        either(listed("moe_layer_freq", 1, listed()), experts(number="n_routed_experts"), gated()),
    ),
    "deepseek_v2": Recipe((latent(),), deepseek("mlp_bias")),
    "deepseek_v3": Recipe((latent(),), deepseek()),
    "kimi_k2": Recipe((latent(),), deepseek()),
    "deepseek_v32": Recipe((indexed(latent()),), deepseek()),
    "glm_moe_dsa": Recipe((indexed(latent()),), deepseek()),
    "glm4_moe_lite": Recipe((latent(),), deepseek()),
    "minicpm3": Recipe((latent(),), gated(bias="mlp_bias")),
    "mamba": Recipe((mamba1(rank="time_step_rank"),), None, norms=1),
    "falcon_mamba": Recipe((mamba1(rank="time_step_rank"),), None, norms=1),
    "mamba2": Recipe((mamba2("use_bias", "use_conv_bias"),), None, norms=1),
    "bamba": Recipe((softmax(BIASED), mamba2()), gated(bias="mlp_bias")),
    "falcon_h1": Recipe(
        (softmax(BIASED), mamba2(out_bias="projectors_bias", normed="mamba_rms_norm")), gated(bias="mlp_bias")
    ),
    "jamba": Recipe(
        (softmax(), mamba1("mamba_proj_bias", "mamba_conv_bias", rank="mamba_dt_rank", norms=True)),
        either(
            lambda fields, index: (
                index % fields.integer("expert_layer_period") == fields.integer("expert_layer_offset", least=0)
                and fields.integer("num_experts") > 1
            ),
            experts("intermediate_size"),
            gated(),
        ),
    ),
    "lfm2_moe": Recipe(
        (softmax(qk_norm="head"), short_convolution), either(from_layer("num_dense_layers"), experts(), gated())
    ),
    "kimi_linear": Recipe(
        (latent(), kimi_delta),
        either(
            listed(otherwise=from_layer("first_k_dense_replace")),
            both(experts(), shared(times("num_shared_experts", "moe_intermediate_size"))),
            gated(),
        ),
        tied=False,
    ),
    "gpt2": Recipe((softmax(True),), plain(inner_or_fourfold("n_inner"), True), norm_bias=True, positions=positions),
    "gpt_bigcode": Recipe(
        (softmax(True),), plain(inner_or_fourfold("n_inner"), True), norm_bias=True, positions=positions
    ),
    "gptj": Recipe((softmax(),), plain(inner_or_fourfold("n_inner"), True), norms=1, norm_bias=True, head_bias=True),
    "gpt_neox": Recipe((softmax(BIASED),), plain(bias=True), norm_bias=True),
    "opt": Recipe(
        (softmax("enable_bias"),), plain("ffn_dim", "enable_bias"), norm_bias=True, positions=lambda f: positions(f) + 2
    ),
    "mpt": Recipe((softmax(),), plain(lambda f: f.integer("expansion_ratio", 4) * f.integer("hidden_size"))),
    "falcon": Recipe(
        (softmax("bias"),), plain(inner_or_fourfold("ffn_hidden_size"), "bias"), norms=falcon_norms, norm_bias=True
    ),
}
