"""Bad configs: one typed error each, that names the field, the value and what is allowed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import KVCoreError, ModelError
from kvcore.models.config_json import Fields, read_config
from kvcore.models.families import model_facts

GOOD = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def test_reads_a_directory_and_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    assert read_config(tmp_path) == read_config(str(tmp_path / "config.json")) == GOOD


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nowhere", "no file or directory"),
        (lambda p: p, "has no config.json"),
        (lambda p: write(p, "{"), "not JSON"),
        (lambda p: write(p, "[1]"), "no JSON object"),
        (lambda p: write(p, b"\xff\xfe\x00"), "cannot read"),
    ],
)
def test_files_that_are_no_config(make, message, tmp_path):
    with pytest.raises(ModelError, match=message) as raised:
        read_config(make(tmp_path))
    assert raised.value.field == "model.path"


def write(folder, content):
    file = folder / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, [2], 10**9])
def test_absurd_numbers_of_layers(value):
    with pytest.raises(ModelError) as raised:
        model_facts({**GOOD, "num_hidden_layers": value})
    assert (raised.value.field, raised.value.got) == ("num_hidden_layers", value)
    assert raised.value.allowed is not None


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "model_type"])
def test_missing_fields_of_a_type_that_has_no_defaults(field):
    with pytest.raises(ModelError) as raised:
        model_facts({k: v for k, v in {**GOOD, "model_type": "baichuan"}.items() if k != field})
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"eos_token_id": "stop"}, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id"),
        ({"architectures": 5}, "architectures"),
        ({"architectures": [{}]}, "architectures"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_only_a_run_needs_does_not_stop_a_plan(changes, field):
    found, good = model_facts({**GOOD, **changes}), model_facts(GOOD)
    assert found.caches == good.caches
    assert [r.field for r in found.refusals] == [field]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_heads"),
        ({"torch_dtype": "int3"}, "dtype"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "odd"]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": "full"}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": "yes"}, "use_sliding_window"),
        ({"model_type": "granite", "attention_multiplier": -1}, "attention_multiplier"),
        ({"model_type": "kimi_k2"}, "qk_nope_head_dim"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
    ],
)
def test_absurd_fields(changes, field):
    with pytest.raises(KVCoreError) as raised:
        model_facts({**GOOD, **changes})
    assert raised.value.field == field


def test_unknown_model_type_lists_the_known_and_the_way():
    with pytest.raises(ModelError) as raised:
        model_facts({**GOOD, "model_type": "martian"})
    error = raised.value
    assert (error.field, error.got) == ("model_type", "martian")
    assert len(error.allowed) < 100  # no list of every name
    with pytest.raises(ModelError) as raised:
        model_facts({**GOOD, "model_type": "qwen33"})
    assert raised.value.allowed[0].startswith("qwen3")
    assert 1 <= len(raised.value.allowed) <= 5
    assert "kvcore_model_adapters" in error.remedy


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"n_layer": 3, "n_head": 4, "n_embd": 8, "n_positions": 9}, (3, 4, 2, 9)),
        ({"n_layers": 3, "n_heads": 4, "d_model": 8, "max_seq_len": 9}, (3, 4, 2, 9)),
        ({"num_layers": 3, "num_heads": 4, "n_embed": 8, "seq_length": 9}, (3, 4, 2, 9)),
    ],
)
def test_aliases(config, want):
    f = Fields(config)
    assert (f.layers, f.heads, f.head_dim, f.integer("max_position_embeddings")) == want


def test_the_text_part_is_read_alone_but_for_what_transformers_takes_from_the_top():
    text = {"model_type": "b", "hidden_size": 2, "dtype": "float32"}
    f = Fields({"model_type": "a", "hidden_size": 1, "pad": 5, "dtype": "float16", "text_config": text})
    assert (f.model_type, f.get("hidden_size"), f.get("pad"), f.get("dtype")) == ("b", 2, None, "float16")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@given(
    field=st.sampled_from([*sorted(GOOD), "head_dim", "rope_parameters", "architectures", "text_config"]), value=JSON
)
def test_any_value_gives_facts_or_a_typed_error(field, value):
    try:
        facts = model_facts({**GOOD, field: value})
    except KVCoreError as error:
        assert error.message  # noqa: PT017
    else:
        assert len(facts.caches) == facts.num_layers


@given(
    kind=st.sampled_from(["gemma3_text", "llama4_text", "jamba", "zamba2", "mpt", "kimi_linear"]),
    field=st.sampled_from(
        [
            "layer_types",
            "layers_block_type",
            "no_rope_layers",
            "hybrid_layer_ids",
            "attn_config",
            "linear_attn_config",
            "per_layer_config",
            "sliding_window",
            "attention_chunk_size",
            "head_dim",
        ]
    ),
    value=JSON,
)
def test_any_value_of_special_fields_gives_facts_or_a_typed_error(kind, field, value):
    mla = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    try:
        model_facts({**GOOD, **mla, "sliding_window": 8, "model_type": kind, field: value})
    except KVCoreError as error:
        assert error.message  # noqa: PT017


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**GOOD, "model_type": {}}, "model_type"),
        ({**GOOD, "model_type": 5}, "model_type"),
        ({"model_type": [], "text_config": GOOD}, "model_type"),
        ({"model_type": "mistral3", "text_config": {**GOOD, "model_type": "mistral4"}}, "model_type"),
        ({"model_type": "gemma3", "llm_config": {**GOOD, "model_type": "martian"}}, "model_type"),
        (
            {"model_type": "martian", "thinker_config": {"text_config": {**GOOD, "model_type": "venusian"}}},
            "model_type",
        ),
        ({"model_type": "martian", "text_config": {"hidden_size": 64}}, "model_type"),
        ({**GOOD, "text_config": GOOD}, "text_config"),
        ({"model_type": "gemma3", "text_config": GOOD, "llm_config": GOOD}, "text_config"),
        ({"model_type": "gemma3", "text_config": [GOOD]}, "text_config"),
        ({**GOOD, "hidden_size": None}, "hidden_size"),
        ({**GOOD, "model_type": "gpt2", "n_embd": 64, "hidden_size": 32}, "hidden_size"),
        ({**GOOD, "rope_scaling": {"rope_type": "spiral"}}, "rope_parameters.rope_type"),
        ({**GOOD, "rope_scaling": {"rope_type": "yarn"}}, "rope_parameters.factor"),
        ({**GOOD, "rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({**GOOD, "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_parameters.factor"),
        ({**GOOD, "rope_scaling": {"rope_type": "dynamic", "factor": float("nan")}}, "factor"),
        ({**GOOD, "rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor"),
        ({**GOOD, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_parameters.long_factor"),
        ({**GOOD, "model_type": "granite", "attention_multiplier": 10**400}, "attention_multiplier"),
        ({**GOOD, "model_type": "jamba", "attn_layer_offset": 9}, "attn_layer_offset"),
        ({**GOOD, "model_type": "bamba", "mamba_d_head": 48}, "mamba_d_head"),
    ],
)
def test_contradictions_and_what_nobody_knows(config, field):
    with pytest.raises(KVCoreError) as raised:
        model_facts(config)
    assert raised.value.field == field


def test_an_inner_type_is_refused_by_its_name():
    inner = {**GOOD, "model_type": "mistral4"}
    with pytest.raises(ModelError, match="mistral4"):
        model_facts({"model_type": "mistral3", "text_config": inner})


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config", "decoder"])
def test_an_unknown_outer_type_says_nothing_on_a_known_part(part):
    found = model_facts({"model_type": "martian_vl", part: GOOD})
    assert found.caches == model_facts(GOOD).caches
    assert found.refusals


def test_deeper_parts():
    found = model_facts({"model_type": "omni", "thinker_config": {"model_type": "thinker", "text_config": GOOD}})
    assert found.caches == model_facts(GOOD).caches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama", "x": ' + "9" * 4301 + "}", "4300 digits"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"num_hidden_layers": 2, "num_hidden_layers": 3}', "num_hidden_layers twice"),
    ],
)
def test_files_that_break_readers(text, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, text))


# Lengths by hand, by the rule of rope.py: what transformers and vLLM make of the same settings.
@pytest.mark.parametrize(
    ("kind", "length", "rope", "want"),
    [
        ("llama", 4096, None, 4096),
        ("llama", 4096, {"type": "linear", "factor": 4}, 16384),
        ("llama", 4096, {"rope_type": "dynamic", "factor": 2.0}, 8192),
        ("gemma3_text", 131072, {"rope_type": "linear", "factor": 8.0}, 131072),
        ("qwen2", 32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ("qwen3", 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ("deepseek_v3", 163840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),
        ("qwen2", 32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
        (
            "llama",
            131072,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
        ),
        ("phi3", 131072, {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 131072),
        ("gpt2", 4096, {"type": "linear", "factor": 4}, 4096),
        ("gptj", 4096, {"type": "linear", "factor": 4}, 4096),
        ("llama", 4096, {"type": "mrope", "mrope_section": [1, 1]}, 4096),
    ],
)
def test_length_and_rope_scaling_say_the_longest_sequence(kind, length, rope, want):
    config = {**GOOD, "model_type": kind, "max_position_embeddings": length, "rope_scaling": rope, "head_dim": 16}
    assert model_facts(config).max_model_len == want
