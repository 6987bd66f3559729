"""What `run` refuses: by the facts before weights load, and by proof where facts were wrong."""

import json
from dataclasses import replace

import pytest
from models.tiny import SPECS, tiny_model

from kvcore.errors import ModelError, UnsupportedModelError
from kvcore.models.config_json import read_config
from kvcore.models.families import BUILT_IN, model_facts
from kvcore.models.families.table import bridged_table
from kvcore.models.transformers_bridge import TransformersModel
from kvcore.settings.cache import CacheSettings

IGNORE_THE_REGISTRY = ("falcon", "bloom", "mpt")
RECURRENT = ("jamba", "mamba", "mamba2", "zamba2", "granite_hybrid", "falcon_h1", "qwen3_next", "lfm2", "nemotron_h")


def facts_of(path, **choice):
    return model_facts(read_config(path), cache=CacheSettings(**{"mla": "expanded", **choice}))


@pytest.mark.parametrize("name", [*IGNORE_THE_REGISTRY, "stablelm"])
def test_attention_that_is_not_reached_is_refused_and_proved(name, tmp_path_factory):
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    facts = facts_of(path)
    assert [r.field for r in facts.refusals] == ["model_type"]
    with pytest.raises(UnsupportedModelError, match="run cannot serve"):
        TransformersModel.load(path, facts, dtype="float32", device="cpu")
    # Were the facts wrong, loading or the proof on one token would say so.
    with pytest.raises(ModelError, match=r"attention|kvcore"):
        TransformersModel.load(path, replace(facts, refusals=()), dtype="float32", device="cpu").check_reached()


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_state_is_refused_before_weights_load(name, tmp_path_factory):
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    facts = facts_of(path)
    assert "recurrent state" in " ".join(r.reason for r in facts.refusals)
    with pytest.raises(UnsupportedModelError, match="run cannot serve"):
        TransformersModel.load(path / "config.json", facts, dtype="float32", device="cpu")


def test_longrope_is_refused_only_beyond_its_original_length(tmp_path_factory):
    facts = facts_of(tiny_model("phi3_longrope", tmp_path_factory.getbasetemp()))
    assert facts.refusals_for(96) == ()
    assert [r.field for r in facts.refusals_for(97)] == ["rope_parameters.rope_type"]
    with pytest.raises(UnsupportedModelError, match="longest sequence") as raised:
        facts.require_runnable(97)
    assert raised.value.remedy == "set engine.max_model_len=96 or less"


def test_dynamic_rope_is_refused_beyond_its_length():
    config = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    facts = model_facts(config)
    assert facts.refusals_for(512) == ()
    assert facts.refusals_for(513)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"vision_config": {"depth": 2}}, "vision_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        (
            {"model_type": "kimi_k2", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
            "model_type",
        ),
    ],
)
def test_reasons_that_stand_in_any_config(changes, field):
    assert field in [r.field for r in model_facts({**LLAMA, **changes}).refusals]


def test_latent_caches_are_refused_with_the_way_out(tmp_path_factory):
    path = tiny_model("deepseek_v3", tmp_path_factory.getbasetemp())
    refusal = facts_of(path, mla="latent").refusals[0]
    assert (refusal.field, refusal.remedy) == ("cache.mla", "set cache.mla=expanded")
    assert facts_of(path).refusals == ()


def test_every_type_that_run_serves_has_a_parity_test(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    proved = set()
    for class_name, _ in SPECS.values():
        import transformers

        proved.add(getattr(transformers, class_name).model_type)
    table = bridged_table()
    assert {row.model_type for row in table if row.status == "bridged"} <= proved
    assert len(table) == sum(len(a.model_types) for a in BUILT_IN)
    assert base.exists()


def test_types_said_to_need_remote_code_are_unknown_to_transformers():
    from transformers import CONFIG_MAPPING

    remote = {name for adapter in BUILT_IN for name in getattr(adapter, "remote", ())}
    assert remote
    assert not remote & set(CONFIG_MAPPING)


def test_table_says_why():
    rows = {row.model_type: row for row in bridged_table()}
    assert rows["llama"].status == "bridged"
    assert rows["deepseek_v3"].why == "with cache.mla=expanded"
    assert "recurrent" in rows["mamba"].why
    assert "ignores the attention registry" in rows["bloom"].why


def copy(path, to):
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("cut", [1, 400, 100_000])
def test_truncated_weights_are_named_before_loading(cut, tmp_path, tmp_path_factory):
    path = copy(tiny_model("llama", tmp_path_factory.getbasetemp()), tmp_path / "cut")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-cut] if cut != 400 else weights.read_bytes()[:400])
    with pytest.raises(ModelError, match="truncated") as raised:
        TransformersModel.load(path, facts_of(path), dtype="float32", device="cpu")
    assert "model.safetensors" in str(raised.value)


def test_missing_weights_are_named(tmp_path, tmp_path_factory):
    path = copy(tiny_model("llama", tmp_path_factory.getbasetemp()), tmp_path / "none")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        TransformersModel.load(path, facts_of(path), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 3), ("intermediate_size", 96), ("hidden_size", 128)]
)
def test_weights_that_do_not_fit_the_config_are_an_error(field, value, tmp_path, tmp_path_factory):
    path = copy(tiny_model("llama", tmp_path_factory.getbasetemp()), tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelError):
        TransformersModel.load(path, facts_of(path), dtype="float32", device="cpu")


def test_an_architecture_that_transformers_lacks_is_an_error(tmp_path, tmp_path_factory):
    path = copy(tiny_model("llama", tmp_path_factory.getbasetemp()), tmp_path / "odd")
    facts = facts_of(path)
    (path / "config.json").write_text(json.dumps({**read_config(path), "model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="transformers cannot load"):
        TransformersModel.load(path, facts, dtype="float32", device="cpu")
