"""Facts against transformers' own caches: shapes of keys, values, latents and states of every layer."""

import pytest
import torch
from models.tiny import SPECS, reference_model, tiny_model

from kvcore.models.config_json import read_config
from kvcore.models.families import model_facts
from kvcore.spec.content import KVHeads, Latent, State

DEFAULT_RUN = ("jamba", "zamba2", "falcon_h1", "qwen3_next", "lfm2", "nemotron_h", "deepseek_v3", "gemma4")
TOKENS = 11  # fewer than any window


def caches_of(name, base):
    path = tiny_model(name, base)
    with torch.no_grad():
        out = reference_model(path)(torch.arange(1, 1 + TOKENS)[None], use_cache=True)
    cache = getattr(out, "past_key_values", None)
    cache = out.cache_params if cache is None else cache
    return model_facts(read_config(path)), cache.layers


def check(name, base):
    facts, layers = caches_of(name, base)
    owned = {c: s.content for c, s in facts.owned.items()}
    compared = 0
    for cache_id, content in owned.items():
        layer = layers[cache_id.layer]
        if isinstance(content, KVHeads):
            assert layer.keys.shape == (1, content.num_kv_heads, TOKENS, content.head_dim)
            assert layer.values.shape == (1, content.num_kv_heads, TOKENS, content.v_dim)
        elif isinstance(content, Latent):
            assert layer.keys.shape == (1, 1, TOKENS, content.rank)
            assert layer.values.shape == (1, 1, TOKENS, content.rope_dim)
        elif isinstance(content, State):
            shapes = dict(zip(content.names, content.shapes, strict=True))
            channels, history = shapes["conv_state"]
            # transformers keeps the newest input too, which the next step does not need.
            assert layer.conv_states[0].shape == (1, channels, history + 1)
            if "ssm_state" in shapes:
                assert layer.recurrent_states[0].shape == (1, *shapes["ssm_state"])
        compared += 1
    assert compared == len(owned) > 0
    # And nothing that transformers keeps is missing from the facts.
    keeps = [i for i, layer in enumerate(layers) if getattr(layer, "keys", None) is not None]
    assert keeps == sorted({c.layer for c, s in owned.items() if not isinstance(s, State)})


@pytest.mark.parametrize("name", DEFAULT_RUN)
def test_shapes_are_those_of_transformers_caches(name, tmp_path_factory):
    check(name, tmp_path_factory.getbasetemp())


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in SPECS if n not in DEFAULT_RUN])
def test_shapes_of_all_other_caches(name, tmp_path_factory):
    check(name, tmp_path_factory.getbasetemp())
