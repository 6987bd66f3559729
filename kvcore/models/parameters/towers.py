"""Parameters of the towers beside a text model: vision encoders and what projects their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.parameters.weight import Weight, Weights, matrix, norm, vector

# From the fields of the tower and the text model's width; each default is that of transformers' class.
Tower = Callable[[Fields, int], Weights]


def encoder(d: int, wide: int, layers: int, *, extra: int = 0) -> Weights:
    """Layers of attention and a plain feed-forward layer, biases everywhere; `extra` numbers a layer on top."""
    layer = 4 * (d * d + d) + (2 * d * wide + wide + d) + 4 * d + extra
    return vector("vision.layers", layers * layer)


def qwen_vl(vision: Fields, text: int) -> Weights:
    """Qwen3-VL, Qwen3.5: patches over time, a merger, and one more for each layer that is read early."""
    d, wide = vision.integer("hidden_size"), vision.integer("intermediate_size")
    square = vision.integer("spatial_merge_size", 2) ** 2
    patch = vision.integer("in_channels", 3) * vision.integer("temporal_patch_size", 2)
    patch *= vision.integer("patch_size", 16) ** 2
    merged, out = square * d, vision.integer("out_hidden_size", text)
    merger = merged * merged + merged + out * merged + out
    early = len(vision.listing("deepstack_visual_indexes") or ())
    return [
        *vector("vision.patch_embed", d * patch + d),
        Weight("vision.pos_embed", (vision.integer("num_position_embeddings"), d)),
        *encoder(d, wide, vision.integer("depth")),
        *vector("vision.merger", 2 * d + merger),
        *vector("vision.deepstack", early * (2 * merged + merger)),
    ]


def gemma4(vision: Fields, text: int) -> Weights:
    """Gemma 4: gated layers without biases, four norms and norms of queries and keys."""
    d, wide = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 3072)
    heads, dim = vision.integer("num_attention_heads", 12), vision.integer("head_dim", 64)
    kv = vision.integer("num_key_value_heads", heads)
    layer = d * dim * 2 * (heads + kv) + 2 * dim + 3 * d * wide + 4 * d
    patch = 3 * vision.integer("patch_size", 16) ** 2
    return [
        Weight("vision.position_embedding_table", (2 * vision.integer("position_embedding_size", 10240), d)),
        Weight("vision.input_proj", (d, patch)),
        *vector("vision.layers", vision.integer("num_hidden_layers", 16) * layer),
        Weight("embed_vision", (text, d)),
    ]


def llama4(vision: Fields, text: int) -> Weights:
    """Llama 4: a class token, an adapter over shuffled patches, a projector."""
    d, wide = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 5632)
    patch = vision.integer("patch_size", 14)
    patches = (vision.integer("image_size", 448) // patch) ** 2 + 1
    into, out = vision.integer("projector_input_dim", 4096), vision.integer("projector_output_dim", 4096)
    return [
        *vector("vision.class_embedding", d),
        Weight("vision.positional_embedding", (patches, d)),
        Weight("vision.patch_embedding", (d, vision.integer("num_channels", 3) * patch * patch)),
        *norm("vision.layernorm_pre", d, True),
        *encoder(d, wide, vision.integer("num_hidden_layers", 34)),
        *norm("vision.layernorm_post", d, True),
        Weight("vision.adapter.fc1", (into, wide)),
        Weight("vision.adapter.fc2", (out, out)),
        Weight("multi_modal_projector", (text, vision.integer("vision_output_dim", 7680))),
    ]


def kimi(vision: Fields, text: int) -> Weights:
    """Kimi-K2.5: patches of 14 x 14 by default, a projector over merged patches."""
    d, wide = vision.integer("vt_hidden_size", 1152), vision.integer("vt_intermediate_size", 4304)
    sides = [vision.integer(f"init_pos_emb_{side}", 64) for side in ("height", "width")]
    kernel = vision.listing("merge_kernel_size", 2) or [2, 2]
    merged = d * prod(Fields({"side": side}, nested=False).integer("side") for side in kernel)
    return [
        *vector("vision.patch_embed", d * 3 * vision.integer("patch_size", 14) ** 2 + d),
        Weight("vision.pos_emb", (sides[0] * sides[1], d)),
        *encoder(d, wide, vision.integer("vt_num_hidden_layers", 27)),
        *norm("vision.final_layernorm", d, True),
        *norm("mm_projector.pre_norm", d, True),
        *matrix("mm_projector.in_proj", merged, merged, bias=True),
        *matrix("mm_projector.out_proj", text, merged, bias=True),
    ]


def minimax_m3(vision: Fields, text: int) -> Weights:
    """MiniMax-M3: patches over time, one projector for patches and one for merged ones."""
    d, wide = vision.integer("hidden_size", 1280), vision.integer("intermediate_size", 5120)
    options = vision.section("img_token_compression_config")
    frames = options.optional("temporal_patch_size") or vision.integer("temporal_patch_size", 2)
    side = options.optional("spatial_merge_size") or vision.integer("spatial_merge_size", 2)
    inner = vision.integer("projection_dim", text)
    patch = vision.integer("num_channels", 3) * frames * vision.integer("patch_size", 14) ** 2
    return [
        Weight("vision.embeddings", (d, patch)),
        *norm("vision.pre_layrnorm", d, True),
        *encoder(d, wide, vision.integer("num_hidden_layers", 32)),
        *matrix("multi_modal_projector.linear_1", inner, d, bias=True),
        *matrix("multi_modal_projector.linear_2", text, inner, bias=True),
        *matrix("multi_modal_projector.merge_linear_1", inner, text * side * side, bias=True),
        *matrix("multi_modal_projector.merge_linear_2", text, inner, bias=True),
    ]


def siglip(vision: Fields, text: int) -> Weights:
    """Gemma 3: SigLIP, a norm and a projection without bias."""
    d, wide = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 3072)
    patch = vision.integer("patch_size", 16)
    return [
        *vector("vision.patch_embedding", d * vision.integer("num_channels", 3) * patch * patch + d),
        Weight("vision.position_embedding", ((vision.integer("image_size", 224) // patch) ** 2, d)),
        *encoder(d, wide, vision.integer("num_hidden_layers", 12)),
        *norm("vision.post_layernorm", d, True),
        Weight("multi_modal_projector", (d, text)),
        *norm("multi_modal_projector.norm", d),
    ]


def step(vision: Fields, text: int) -> Weights:
    """Step-3.7: two numbers a channel scale what a layer adds; two strided convolutions quarter the patches."""
    d = vision.integer("hidden_size", 1536)
    wide = int(d * vision.number("mlp_ratio", 8960 / 1536))
    patch = vision.integer("num_channels", 3) * vision.integer("patch_size", 14) ** 2
    return [
        Weight("vision.patch_embedding", (d, patch)),
        Weight("vision.position_embedding", (vision.integer("max_position_embeddings", 2704), d)),
        *norm("vision.pre_layernorm", d, True),
        *encoder(d, wide, vision.integer("num_hidden_layers", 47), extra=2 * d),
        *(w for i in (1, 2) for w in vector(f"vision.downsampler{i}", 2 * i * d * (9 * i * d + 1))),
        Weight("multi_modal_projector", (text, 4 * d)),
    ]


TOWERS: Mapping[str, Tower] = {
    "gemma3": siglip,
    "gemma4": gemma4,
    "kimi_k25": kimi,
    "llama4": llama4,
    "minimax_m3_vl": minimax_m3,
    "qwen3_5": qwen_vl,
    "qwen3_5_moe": qwen_vl,
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
    "step3p7": step,
}


def towers(fields: Fields) -> Weights:
    """What lies beside the text model; nothing for a config that describes text alone.

    Raises:
        ModelError: The config has a tower that no formula describes.
    """
    if fields.outer is fields.inner:
        return []
    outer = fields.types[0] if fields.types else ""
    unknown = [n for n in fields.outer if n.endswith("_config") and ("audio" in n or "speech" in n) and fields.outer[n]]
    if outer not in TOWERS or unknown:
        raise ModelError(
            f"nothing tells the size of what {outer or 'this config'} has beside its text model",
            field=unknown[0] if unknown else "vision_config",
            got="present",
            allowed=f"a vision tower of {', '.join(sorted(TOWERS))}",
            remedy="set model.weight_bytes, or give the cache itself: cache.memory=BYTES",
        )
    given = fields.outer.get("vision_config")
    vision = Fields(given if isinstance(given, Mapping) else {}, nested=False)
    return TOWERS[outer](vision, fields.integer("hidden_size"))
