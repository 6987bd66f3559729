"""Parameters by formula against transformers' own modules on the meta device, which holds no bytes."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from models.tiny import SPECS, reference_model, tiny_model
from real_configs import REAL, model_name
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields, read_config
from kvcore.models.families import adapters_by_type
from kvcore.models.parameters.recipes import RECIPES

DATA = Path(__file__).parents[1] / "data" / "hf_configs"
ADAPTERS = adapters_by_type()
# Where transformers builds a decoder alone under this name.
CLASSES = {"whisper": "WhisperForConditionalGeneration"}
# Model types that only exist as the text part of another: the class, and the field of its config.
PARTS = {"qwen3_vl_text": "qwen3_vl", "qwen3_vl_moe_text": "qwen3_vl_moe", "step3p5": "step3p7", "step3p7": "step3p7"}
# What a class's own defaults leave out, or give too large to be built.
NEEDED = {
    "glm4_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "ministral": {"head_dim": 128},
    "zamba2": {"num_hidden_layers": 54},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "gemma3n_text": {"num_hidden_layers": 35},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
# No class of these is known to transformers; their formulas are those of the types beside them.
NO_CLASS = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3_vl_text",
    "internlm2": "llama",
}
SWITCHES = (
    "attention_bias",
    "attention_out_bias",
    "attention_k_eq_v",
    "add_bias_linear",
    "bias",
    "block_auto_adjust_ff_dim",
    "conv_bias",
    "enable_bias",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mamba_rms_norm",
    "mlp_bias",
    "multi_query",
    "new_decoder_architecture",
    "projectors_bias",
    "qk_layernorm",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_conv_bias",
    "use_double_wide_mlp",
    "lm_head_bias",
    "use_parallel_residual",
    "use_post_norm",
    "use_qk_norm",
    "use_qkv_bias",
    "use_shared_attention_adapter",
)


def parameters(config, name):
    """Parameters of transformers' class for a config, by the first name that knows one."""
    for table in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        found = CLASSES.get(name) or table.get(name)
        if found:
            break
    with torch.device("meta"):
        model = getattr(transformers, found if isinstance(found, str) else found[0])(config)
    return sum(p.numel() for p in model.parameters())


def by_formula(config):
    return ADAPTERS[Fields(config).model_type]().weights(config).count


def written(config):
    return json.loads(config.to_json_string(use_diff=False))


@cache
def types():
    return sorted(set(RECIPES) - set(NO_CLASS))


# Switches that a class reads otherwise than any checkpoint (untied, Zamba2 shares no blocks), or does not take.
UNREAL = {("zamba2", "tie_word_embeddings"), ("internlm3", "attention_bias"), ("internlm3", "mlp_bias")}


def small(name, **changes):
    """A class's own defaults with few layers."""
    given = {"num_hidden_layers": 6, **NEEDED.get(name, {}), **changes}
    if name == "nemotron_h":  # its class counts the list
        del given["num_hidden_layers"]
    if name in PARTS:
        top = {k: given.pop(k) for k in ("tie_word_embeddings",) if k in given}
        return CONFIG_MAPPING[PARTS[name]](text_config=given, **top)
    return CONFIG_MAPPING[name](**given)


def check(name, **changes):
    config = small(name, **changes)
    assert by_formula(written(config)) == parameters(config, PARTS.get(name, name)), (name, changes)


@pytest.mark.parametrize("name", types())
def test_every_family_has_the_parameters_of_transformers(name):
    check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", types())
def test_every_switch_of_a_family_counts(name):
    known = CONFIG_MAPPING[PARTS.get(name, name)]().get_text_config(decoder=True).to_dict()
    for switch in SWITCHES:
        if isinstance(known.get(switch), bool) and (name, switch) not in UNREAL:
            check(name, **{switch: not known[switch]})


@pytest.mark.parametrize("file", REAL, ids=model_name)
def test_real_configs_have_the_parameters_of_transformers(file):
    config = read_config(file)
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no class for {kind}")
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    if kind == "step3p7":  # a file of text fields alone; the class wants them nested, and has a tower all the same
        plain = {"text_config": {k: v for k, v in plain.items() if k != "model_type"}}
        config = {**config, "vision_config": {}, "text_config": {**config, "model_type": "step3p5"}}
    found = CONFIG_MAPPING[kind].from_dict(plain)
    assert by_formula(config) == parameters(found, kind)


@pytest.mark.parametrize(("name", "like"), NO_CLASS.items())
def test_types_that_transformers_lacks_count_as_their_like(name, like):
    config = written(small(like))
    assert by_formula({**config, "model_type": name}) == by_formula(config)


# Millions in the name, and what of the embeddings makes them up: all, without the input's, or none. Qwen3-8B and the
# like are named after a rounded total that is 2.4 % off; the publishers' own figure is given for those.
NAMED = {
    "Qwen--Qwen3-0.6B": (600, "all"),
    "Qwen--Qwen3-1.7B": (1_700, "all"),
    "Qwen--Qwen3-8B": (8_200, "all"),
    "Qwen--Qwen3-32B": (32_000, "without input"),
    "Qwen--Qwen3-30B-A3B": (30_500, "all"),
    "Qwen--Qwen3-235B-A22B": (235_000, "all"),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480_000, "all"),
    "Qwen--Qwen3-VL-2B-Instruct": (2_100, "all"),
    "Qwen--Qwen3-VL-32B-Instruct": (33_000, "all"),
    "Qwen--Qwen3.5-27B": (27_000, "all"),
    "Qwen--Qwen3.5-35B-A3B": (35_000, "all"),
    "nvidia--Qwen3.5-122B-A10B-NVFP4": (122_000, "all"),
    "google--gemma-4-26B-A4B": (26_000, "all"),
    "meta-llama--Meta-Llama-3.1-8B": (8_000, "all"),
    "meta-llama--Meta-Llama-3.1-70B": (70_000, "all"),
    "mistralai--Mixtral-8x7B-v0.1": (46_700, "all"),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_600, "all"),
    "nvidia--Nemotron-H-56B-Base-8K": (56_000, "all"),
    "openai--gpt-oss-120b": (117_000, "all"),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_size_in_the_name_is_met_within_two_percent(name):
    config = read_config(DATA / f"{name}_config.json")
    weights = ADAPTERS[Fields(config).model_type]().weights(config)
    millions, embeddings = NAMED[name]
    left = weights.first[0].elements if embeddings == "without input" else 0
    assert (weights.count - left) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("name", SPECS)
def test_tiny_checkpoints_have_the_bytes_that_are_loaded(name, tmp_path_factory):
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    loaded = sum(p.numel() for p in reference_model(path).parameters())
    assert by_formula(read_config(path)) == loaded


def test_the_default_models_preset_says_what_the_formula_says(repo):
    preset = yaml.safe_load((repo / "conf" / "model" / "smollm2-135m.yaml").read_text())
    assert by_formula(preset["geometry"]) == preset["parameters"]


def test_widths_are_never_guessed():
    config = written(small("llama"))
    del config["intermediate_size"]
    with pytest.raises(ModelError) as raised:
        by_formula(config)
    assert raised.value.field == "intermediate_size"
    assert "model.weight_bytes" in raised.value.remedy


def test_an_unknown_tower_is_refused():
    text = written(small("llama"))
    with pytest.raises(ModelError) as raised:
        ADAPTERS["llama"]().weights({"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert raised.value.field == "vision_config"
