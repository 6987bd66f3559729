"""Absent and null fields mean what transformers' config classes make of them, for every model type."""

import json
import logging

import pytest
from models.make_defaults import NO_CLASS, TABLE, table, text
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcore.errors import KVCoreError
from kvcore.models.families import BUILT_IN, model_facts

TYPES = sorted({name for adapter in BUILT_IN for name in adapter.model_types})
WITH_CLASS = [name for name in TYPES if name not in NO_CLASS]
# Small values of the fields that planning reads; each class is given those that it knows.
SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "sliding_window": 48,
    "attention_chunk_size": 48,
    "sliding_window_pattern": 3,
    "max_window_layers": 5,
    "use_sliding_window": True,
    "no_rope_layer_interval": 3,
    "full_attention_interval": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_kv_shared_layers": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "index_head_dim": 48,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "mamba_n_heads": 16,
    "mamba_num_heads": 8,
    "mamba_d_head": 64,
    "mamba_head_dim": 16,
    "mamba_d_state": 24,
    "ssm_state_size": 24,
    "state_size": 24,
    "mamba_d_conv": 3,
    "conv_kernel": 3,
    "n_groups": 2,
    "num_heads": 16,
    "mamba_d_ssm": 1024,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "n_mamba_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 3,
    "conv_L_cache": 4,
    "use_long_context": True,
    "multi_query": False,
    "new_decoder_architecture": True,
    "alibi": True,
    "attention_multiplier": 0.5,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 20.0,
    "scale_attn_weights": False,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "d_model": 512,
    "max_source_positions": 70,
    "max_target_positions": 60,
}
OTHERS = {"mamba2": {"head_dim": 64}, "zamba2": {"num_hidden_layers": 54}, "whisper": {"decoder_attention_heads": 4}}
# Type and field where we differ from transformers on purpose, and why.
EXPLAINED: dict[tuple[str, str], str] = {
    ("*", "vocab_size"): "only a run needs it: a plan goes on where transformers refuses null",
    ("qwen2_vl_text", "max_window_layers"): "its class takes null and then compares it with a number",
    ("qwen2_5_vl_text", "max_window_layers"): "as above",
}

REFUSED = object()


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def read(config):
    """What a plan takes from a config."""
    found = model_facts(config, dtype="bfloat16")
    return found.num_layers, found.max_model_len, found.vocab_size, [(c.spec, c.query, c.shares) for c in found.caches]


def by_class(config):
    """The same config with every field that transformers' class fills in."""
    return CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"}).to_dict()


def test_the_table_is_that_of_the_classes():
    assert TABLE.read_text() == text(table()), "run python tests/models/make_defaults.py"


def test_every_type_has_a_row_or_an_explanation():
    rows = json.loads(TABLE.read_text())["types"]
    assert {*rows, *NO_CLASS} >= set(TYPES)
    assert not [name for name in NO_CLASS if name in rows or name in CONFIG_MAPPING]


@pytest.mark.parametrize("name", WITH_CLASS)
def test_a_config_of_nothing_but_its_type(name):
    config = {"model_type": name}
    assert outcome(read, config) == outcome(lambda c: read(by_class(c)), config)


def outcome(make, config):
    """What `make` gives, or REFUSED; ours may only refuse by a typed error."""
    try:
        return make(config)
    except KVCoreError:
        return REFUSED
    except Exception:
        if make is read:
            raise
        return REFUSED


def small(name):
    """Small fields of a class, and where its text part lies."""
    kind = CONFIG_MAPPING[name]
    text = kind().get_text_config(decoder=True)
    known = {**text.to_dict(), **dict.fromkeys(text.attribute_map)}
    fields = {k: v for k, v in SMALL.items() if k in known and text.attribute_map.get(k, k) not in SMALL.keys() - {k}}
    return {**fields, **OTHERS.get(name, {})}, type(text) is not kind and name != "whisper"


@pytest.mark.parametrize("name", WITH_CLASS)
def test_each_field_absent_or_null(name):
    fields, nested = small(name)

    def config(changed):
        return {"model_type": name, **({"text_config": changed} if nested else changed)}

    changes = [fields, {}]
    changes += [{k: v for k, v in fields.items() if k != drop} for drop in fields]
    changes += [{**fields, null: None} for null in fields]
    spoilt = {"hidden_size": 500, "layer_types": ["full_attention"], "rope_scaling": {"rope_type": "yarn"}}
    changes += [{**fields, field: value} for field, value in spoilt.items()]
    changes += [{**fields, "layer_types": ["unheard_of"] * fields.get("num_hidden_layers", 1)}]
    compared, unlike = 0, []
    for changed in changes:
        what = " ".join(sorted({k for k in fields if changed.get(k) is None})) if changed else "all"
        wanted, found = outcome(lambda c: read(by_class(c)), config(changed)), outcome(read, config(changed))
        spoils = changed.keys() - fields or changed.get("hidden_size") == 500
        # A config that transformers refuses is refused; one that contradicts itself may be refused by us alone.
        if found != wanted and not (spoils and found is REFUSED):
            unlike.append(what or str(changed))
        compared += wanted is not REFUSED
    assert {f for f in unlike if (name, f) not in EXPLAINED and ("*", f) not in EXPLAINED} == set()
    assert compared > len(fields) / 5
