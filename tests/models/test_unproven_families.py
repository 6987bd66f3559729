"""Families that are planned alone: what every layer keeps, against the caches of transformers' own tiny models."""

import json
from importlib import import_module

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvcore.models.families import model_facts
from kvcore.models.families.unproven import ADAPTERS
from kvcore.spec.content import KVHeads, Latent

TOKENS, WINDOW = 11, 8
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_hidden_layers": 6,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": WINDOW,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_embd": 64,
    "n_layer": 6,
    "n_head": 4,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"] * 2
# The defaults of their classes would be full throughout.
LISTED = dict.fromkeys(("laguna", "mellum"), MIXED)
# Latents are expanded to a key of every query head.
EVERY_HEAD = {"num_key_value_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Positions in time, height and width share the 8 rotations of a head.
IMAGES = {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}}
OWN = {
    "axk1": EVERY_HEAD,
    "sarvam_mla": EVERY_HEAD,
    "youtu": EVERY_HEAD,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]} | IMAGES,
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "glm4v_text": IMAGES,
    "glm_ocr_text": IMAGES,
    "hunyuan_vl_text": IMAGES,
    "paddleocr_vl_text": IMAGES,
    "qwen2_5_omni_text": IMAGES,
    "qwen2_5_vl_text": IMAGES,
    "qwen2_vl_text": IMAGES,
    "qwen3_omni_moe_text": IMAGES,
}
# Where the text model of a multimodal class has another name than its config.
CLASSES = {"qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel", "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel"}
TYPES = sorted(name for adapter in ADAPTERS for name in adapter.model_types)


def tiny(name):
    kind = CONFIG_MAPPING[name]
    known = {*kind().to_dict(), *kind.attribute_map}
    given = {k: v for k, v in SMALL.items() if k in known and kind.attribute_map.get(k) not in SMALL}
    given |= OWN.get(name, {})
    return kind(**given, **({"layer_types": LISTED[name]} if name in LISTED else {}))


def model_of(config):
    """The class of a decoder, or of the text part of a multimodal model, which has no head of its own."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM.from_config(config).eval()
    where = type(config).__module__.replace("configuration_", "modeling_")
    name = CLASSES.get(config.model_type, type(config).__name__.replace("Config", "Model"))
    return getattr(import_module(where), name)(config).eval()


@pytest.mark.parametrize("name", TYPES)
def test_every_layer_keeps_what_transformers_keeps(name):
    config = tiny(name)
    torch.manual_seed(0)
    model = model_of(config)
    with torch.no_grad():
        layers = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True).past_key_values.layers
    written = json.loads(config.to_json_string(use_diff=False))
    for derived in ("layer_types",) if name not in LISTED else ():
        written.pop(derived, None)  # our own rule is asked, not the class's
    facts = model_facts({**written, "model_type": name})
    assert len(layers) == len(facts.caches) == 6
    for layer, cache in zip(layers, facts.caches, strict=True):
        content, window = cache.spec.content, getattr(cache.spec.retention, "size", None)
        kept = TOKENS if window is None else WINDOW - 1
        if isinstance(content, KVHeads):
            assert layer.keys.shape == (1, content.num_kv_heads, kept, content.head_dim)
            assert layer.values.shape == (1, content.num_kv_heads, kept, content.v_dim)
        else:
            assert isinstance(content, Latent)
            assert layer.keys.shape == (1, 1, TOKENS, content.rank)
            assert layer.values.shape == (1, 1, TOKENS, content.rope_dim)
        assert window in (None, WINDOW)
    assert facts.refusals  # no parity test has proved them
