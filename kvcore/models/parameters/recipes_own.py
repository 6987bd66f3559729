"""Recipes of architectures that have weights of their own kind beside attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from kvcore.models.config_json import Fields
from kvcore.models.parameters.attention import latent, softmax, switched
from kvcore.models.parameters.feed_forward import both, by_layer, either, experts, gated, listed, plain, shared, times
from kvcore.models.parameters.recipe import Recipe
from kvcore.models.parameters.states import mamba2, short_convolution
from kvcore.models.parameters.weight import Weight, Weights, matrix, norm, vector, width
from kvcore.models.parts import CachePart, Heads, LatentHeads, Recurrent

BIASED = "attention_bias"


# Gemma 3n, Gemma 4: each layer has an embedding of its own for every token.


def layer_inputs(fields: Fields) -> Weights:
    """The embeddings that layers add to their inputs; none where they have no width."""
    d, own = fields.integer("hidden_size"), fields.optional("hidden_size_per_layer_input", least=0)
    if not own:
        return []
    rows, wide = width(fields, "vocab_size_per_layer_input"), fields.layers * own
    return [
        Weight("model.embed_tokens_per_layer", (rows, wide), parts=rows),
        *matrix("model.per_layer_model_projection", wide, d),
        *norm("model.per_layer_projection_norm", own),
    ]


def layer_input(fields: Fields, index: int) -> Weights:
    """What a layer does with its own embedding."""
    d, own = fields.integer("hidden_size"), fields.optional("hidden_size_per_layer_input", least=0)
    if not own:
        return []
    return [
        *matrix("per_layer_input_gate", own, d),
        *matrix("per_layer_projection", d, own),
        *norm("post_per_layer_input_norm", d),
    ]


def gemma3n_width(fields: Fields, index: int) -> int:
    """One width, or one a layer."""
    listed_widths = by_layer(fields, "intermediate_size")
    if listed_widths is None:
        return width(fields, "intermediate_size")
    return Fields({"intermediate_size": listed_widths[index]}, nested=False).integer("intermediate_size")


def gemma3n_layer(fields: Fields, index: int) -> Weights:
    """The feed-forward layer, alternating updates (AltUp) and the learned low-rank residual (LAuReL)."""
    d, streams = fields.integer("hidden_size"), fields.integer("altup_num_inputs", 4)
    rank = fields.integer("laurel_rank", 64)
    return [
        *gated(lambda f: gemma3n_width(f, index))(fields, index),
        *vector("altup.correct_output_scale", d),
        *vector("altup.coefs", streams * streams + streams**3),
        *vector("altup.modality_router", streams * d),
        *norm("altup.router_norm", d),
        *matrix("laurel.linear_left", rank, d),
        *matrix("laurel.linear_right", d, rank),
        *norm("laurel.post_laurel_norm", d),
        *layer_input(fields, index),
    ]


def gemma3n_outside(fields: Fields) -> Weights:
    """Embeddings of the layers, and the projections to and from the streams."""
    d, streams = fields.integer("hidden_size"), fields.integer("altup_num_inputs", 4)
    return layer_inputs(fields) + [w for i in range(2 * (streams - 1)) for w in matrix(f"model.altup_{i}", d, d)]


def gemma4_layer(fields: Fields, index: int) -> Weights:
    """A dense layer, of double width in layers that share a cache; experts beside it with `enable_moe_block`."""
    d, wide = fields.integer("hidden_size"), width(fields, "intermediate_size")
    tail = index >= fields.layers - fields.integer("num_kv_shared_layers", 0, least=0)
    wide *= 2 if tail and fields.flag("use_double_wide_mlp") else 1
    found = gated(lambda _: wide)(fields, index) + layer_input(fields, index)
    if not fields.flag("enable_moe_block"):
        return found
    count = width(fields, "num_experts")
    return [*found, *experts(name="")(fields, index), *vector("gate.scales", d + count), *vector("norms", 3 * d)]


# Llama 4: experts in every `interleave_moe_layer_step`-th layer, or in those that `moe_layers` lists.


def llama4_sparse(fields: Fields, index: int) -> bool:
    """Whether a layer has experts."""
    chosen = fields.listing("moe_layers")
    if chosen is not None:
        return index in chosen
    return (index + 1) % fields.integer("interleave_moe_layer_step") == 0


# LongCat-Flash: two attentions and dense layers a block, experts beside the first; some experts do nothing.


def longcat_layer(fields: Fields, index: int) -> Weights:
    """A dense layer; in the first half of a block the experts as well."""
    d, wide = fields.integer("hidden_size"), width(fields, "expert_ffn_hidden_size")
    dense = gated("ffn_hidden_size")(fields, index)
    if index % 2:
        return dense
    count, idle = width(fields, "n_routed_experts"), fields.optional("zero_expert_num", least=0) or 0
    router_bias = bool(fields.get("router_bias", False))
    return [
        *dense,
        *vector("mlp.gate", (count + idle) * d),
        *vector("mlp.gate.bias", (count + idle) * router_bias),
        *matrix("mlp.experts.gate_up_proj", 2 * wide, d, parts=wide, copies=count + idle),
        *matrix("mlp.experts.down_proj", d, wide, parts=wide, rows=True, copies=count),
    ]


# Nemotron-H: a layer is a mixer, a dense layer or experts, never two of them.


def nemotron_layer(fields: Fields, index: int) -> Weights:
    """Squared ReLU: no gate; experts may work in a narrower space of their own."""
    listed_kinds = fields.listing("layers_block_type") or fields.listing("layer_types")
    letters = fields.get("hybrid_override_pattern")
    marks = listed_kinds or (list(letters) if isinstance(letters, str) else ["mamba", "moe", "attention", "mlp"])
    mark = marks[index] if index < len(marks) else None
    if mark in ("-", "mlp"):
        return plain(bias="mlp_bias")(fields, index)
    if mark not in ("E", "moe"):
        return []
    d, narrow = fields.integer("hidden_size"), fields.optional("moe_latent_size")
    count, wide = width(fields, "n_routed_experts"), width(fields, "moe_intermediate_size")
    added, into = fields.flag("mlp_bias"), narrow or d
    found = vector("mlp.gate", count * d)
    if narrow:
        found += matrix("mlp.fc1_latent_proj", narrow, d, bias=added)
        found += matrix("mlp.fc2_latent_proj", d, narrow, bias=added)
    return [
        *found,
        *matrix("mlp.experts.up_proj", wide, into, parts=wide, copies=count),
        *matrix("mlp.experts.down_proj", into, wide, parts=wide, rows=True, copies=count),
        *plain("moe_shared_expert_intermediate_size", "mlp_bias", name="mlp.shared_experts")(fields, index),
    ]


def granite_layer(fields: Fields, index: int) -> Weights:
    """Experts where there are any, and a dense layer for every token."""
    routed = (
        experts("intermediate_size", "num_local_experts")(fields, index)
        if fields.optional("num_local_experts", least=0)
        else []
    )
    wide = width(fields, "shared_intermediate_size", least=0)
    return routed + (gated(lambda _: wide, name="shared_mlp")(fields, index) if wide else [])


# Zamba2: a few blocks of attention over twice the width, shared by all hybrid layers; adapters tell those apart.


def zamba2_heads(fields: Fields, part: CachePart) -> Weights:
    """A hybrid layer's own weights: its projection and its adapters of the shared block."""
    if not isinstance(part, Heads):
        return []
    d, rank, wide = fields.integer("hidden_size"), fields.integer("adapter_rank"), width(fields, "intermediate_size")
    found = [*matrix("linear", d, d), *matrix("mlp_adapter.0", rank, d), *matrix("mlp_adapter.1", 2 * wide, rank)]
    if fields.flag("use_shared_attention_adapter"):
        for name in "qkv":
            found += matrix(f"{name}_adapter.0", rank, 2 * d) + matrix(f"{name}_adapter.1", 2 * d, rank)
    return found


def zamba2_shared(fields: Fields) -> Weights:
    """The shared blocks, each once; every stage that has hybrid layers would hold them."""
    d, wide, h = fields.integer("hidden_size"), width(fields, "intermediate_size"), fields.heads
    inner, kv = 2 * d, 2 * d // h * fields.kv_heads
    added = fields.flag("add_bias_linear")
    block = [
        *matrix("shared_transformer.self_attn.q_proj", inner, inner, parts=h),
        *matrix("shared_transformer.self_attn.k_proj", kv, inner, parts=fields.kv_heads),
        *matrix("shared_transformer.self_attn.v_proj", kv, inner, parts=fields.kv_heads),
        *matrix("shared_transformer.self_attn.o_proj", d, inner, parts=h, rows=True),
        *matrix("shared_transformer.feed_forward.gate_up_proj", 2 * wide, d, bias=added, parts=wide),
        *matrix("shared_transformer.feed_forward.down_proj", d, wide, bias=added, parts=wide, rows=True),
        *norm("shared_transformer.norms", inner + d),
    ]
    return block * fields.integer("num_mem_blocks")


# Whisper: the encoder is loaded as well; keys have no bias.


def whisper_encoder(fields: Fields) -> Weights:
    """Two convolutions, positions, and layers of attention over all frames."""
    d, wide, mels = fields.integer("hidden_size"), width(fields, "encoder_ffn_dim"), fields.integer("num_mel_bins", 80)
    layer = [
        *(w for name in "qvo" for w in matrix(f"encoder.self_attn.{name}_proj", d, d, bias=True)),
        *matrix("encoder.self_attn.k_proj", d, d),
        *plain(lambda _: wide, True, name="encoder.mlp")(fields, 0),
        *(w for i in range(2) for w in norm(f"encoder.norm_{i}", d, True)),
    ]
    return [
        Weight("encoder.conv1", (d, 3 * mels)),
        Weight("encoder.conv2", (d, 3 * d)),
        *vector("encoder.conv_biases", 2 * d),
        Weight("encoder.embed_positions", (fields.integer("max_source_positions"), d)),
        *layer * fields.integer("encoder_layers"),
        *norm("encoder.layer_norm", d, True),
    ]


# DeepSeek-V4: one vector is key and value of all heads; outputs are projected in groups; residual streams are mixed.


def v4_attention(fields: Fields, part: CachePart) -> Weights:
    """The window's projections with its layer; compressors and indexers with the states that they fill."""
    d, q_rank = fields.integer("hidden_size"), fields.integer("q_lora_rank")
    if isinstance(part, LatentHeads) and part.role == "self":
        h, dim = part.num_heads, part.rank + part.rope_dim
        groups, o_rank = fields.integer("o_groups"), fields.integer("o_lora_rank")
        return [
            *vector("self_attn.sinks", h, parts=h),
            *matrix("self_attn.q_a_proj", q_rank, d),
            *norm("self_attn.q_a_norm", q_rank),
            *matrix("self_attn.q_b_proj", h * dim, q_rank, parts=h),
            *matrix("self_attn.kv_proj", dim, d),
            *norm("self_attn.kv_norm", dim),
            *matrix("self_attn.o_a_proj", groups * o_rank, h * dim // groups, parts=groups),
            *matrix("self_attn.o_b_proj", d, groups * o_rank, parts=groups, rows=True),
        ]
    if not isinstance(part, Recurrent):
        return []
    (_, (rate, wide), _), overlapping = part.tensors[0], len(part.tensors) > 2
    name = "self_attn.compressor" if part.role == "compressor" else "self_attn.indexer"
    found = [
        Weight(f"{name}.position_bias", (rate, wide)),
        *matrix(f"{name}.kv_proj", wide, d),
        *matrix(f"{name}.gate_proj", wide, d),
        *norm(f"{name}.kv_norm", wide // 2 if overlapping else wide),
    ]
    if part.role == "index_compressor":
        heads = fields.integer("index_n_heads")
        found += matrix(f"{name}.q_b_proj", heads * wide // 2, q_rank) + vector(f"{name}.weights_proj", heads * d)
    return found


def v4_streams(fields: Fields, index: int) -> Weights:
    """Before attention and experts: a mixing of the residual streams."""
    d, n = fields.integer("hidden_size"), fields.integer("hc_mult")
    mixes = (2 + n) * n
    return [w for name in ("attn_hc", "ffn_hc") for w in vector(name, mixes * n * d + mixes + 3)]


def v4_head(fields: Fields) -> Weights:
    """The mixing of the streams into one, before the last norm."""
    d, n = fields.integer("hidden_size"), fields.integer("hc_mult")
    return vector("model.hc_head", n * n * d + n + 1)


# MiniMax-M3: an indexer of a few heads in the sparse layers.


def m3_layer(fields: Fields, index: int) -> Weights:
    """Experts and a shared one, or a dense layer; and the indexer of layers that are sparse."""
    mixture = both(experts("intermediate_size", "num_local_experts"), shared("shared_intermediate_size"))
    sparse = listed(otherwise=listed("moe_layer_freq", 1))(fields, index)
    found = (mixture if sparse else gated("dense_intermediate_size"))(fields, index)
    options = fields.section("sparse_attention_config")
    marks = by_layer(fields, "layer_types") or options.listing("sparse_attention_freq", fields.layers)
    if marks is None or marks[index] not in (1, "minimax_m3_sparse"):
        return found
    d = fields.integer("hidden_size")
    heads = options.optional("sparse_num_index_heads") or fields.integer("index_n_heads", 4)
    dim = options.optional("sparse_index_dim") or fields.integer("index_head_dim", 128)
    return [
        *found,
        *matrix("self_attn.indexer.q_proj", heads * dim, d),
        *matrix("self_attn.indexer.k_proj", dim, d),
        *vector("self_attn.indexer.norms", 2 * dim),
    ]


def step_sparse(fields: Fields, index: int) -> bool:
    """Experts where listed, else in the layers of `moe_layers_enum`, else from the fourth on."""
    chosen = fields.get("moe_layers_enum")
    if isinstance(chosen, str):
        return str(index) in [part.strip() for part in chosen.split(",")]
    return index >= 3 if chosen is None else index in (fields.listing("moe_layers_enum") or ())


def lfm2_width(fields: Fields) -> int:
    """Two thirds of the stated width, times a factor, rounded up to a multiple."""
    wide = width(fields, "block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return wide
    wide, factor = 2 * wide // 3, fields.get("block_ffn_dim_multiplier")
    if factor is None:
        return wide
    step = fields.integer("block_multiple_of")
    return ceil(int(fields.number("block_ffn_dim_multiplier") * wide) / step) * step


def stablelm_norms(fields: Fields, index: int) -> int:
    """One where attention and feed-forward run side by side."""
    return 1 if fields.flag("use_parallel_residual") else 2


def stablelm_heads(fields: Fields, part: CachePart) -> Weights:
    """A norm for each head, with `qk_layernorm`."""
    found = softmax("use_qkv_bias", False)(fields, part)
    if not isinstance(part, Heads) or not switched(fields, "qk_layernorm"):
        return found
    return found + norm("self_attn.qk_norms", (part.num_heads + part.num_kv_heads) * part.head_dim)


MINIMAX_M3 = Recipe((softmax(qk_norm="head"),), m3_layer)
STEP = Recipe(
    (softmax(BIASED, qk_norm="head", gate="head"),),
    either(
        listed(otherwise=step_sparse), both(experts(), shared("share_expert_dim", "mlp_bias")), gated(bias="mlp_bias")
    ),
)
V4 = Recipe(
    (v4_attention,),
    both(
        v4_streams,
        experts(number="n_routed_experts"),
        shared(times("n_shared_experts", "moe_intermediate_size"), "mlp_bias"),
    ),
    extra=v4_head,
)
OWN_RECIPES: Mapping[str, Recipe] = {
    "gemma3n_text": Recipe((softmax(BIASED, qk_norm="head"),), gemma3n_layer, norms=4, extra=gemma3n_outside),
    "gemma4_text": Recipe((softmax(BIASED, qk_norm="head"),), gemma4_layer, norms=4, extra=layer_inputs),
    "llama4_text": Recipe(
        (softmax(BIASED),),
        either(
            llama4_sparse,
            both(experts("intermediate_size", "num_local_experts"), shared("intermediate_size")),
            gated("intermediate_size_mlp"),
        ),
    ),
    "longcat_flash": Recipe((latent(),), longcat_layer),
    "nemotron_h": Recipe((softmax(), mamba2("use_bias", "use_conv_bias")), nemotron_layer, norms=1, tied=False),
    "granitemoehybrid": Recipe((softmax(BIASED), mamba2()), granite_layer),
    "granitemoeshared": Recipe((softmax(BIASED),), granite_layer),
    "zamba2": Recipe((zamba2_heads, mamba2("add_bias_linear", True)), None, norms=1, extra=zamba2_shared),
    "whisper": Recipe(
        (softmax(True, key_bias=False),),
        plain("decoder_ffn_dim", True),
        norms=3,
        norm_bias=True,
        positions=lambda fields: fields.integer("max_target_positions"),
        extra=whisper_encoder,
    ),
    "deepseek_v4": V4,
    "deepseek_ref": V4,
    "minimax_m3": MINIMAX_M3,
    "minimax_m3_vl_text": MINIMAX_M3,
    "step3p5": STEP,
    "step3p7": STEP,
    "lfm2": Recipe((softmax(qk_norm="head"), short_convolution), gated(lfm2_width)),
    "stablelm": Recipe((stablelm_heads,), gated(), norms=stablelm_norms, norm_bias=True),
    "bloom": Recipe(
        (softmax(True),),
        plain(lambda fields: 4 * fields.integer("hidden_size"), True),
        norm_bias=True,
        extra=lambda fields: norm("embeddings_norm", fields.integer("hidden_size"), True),
    ),
}
