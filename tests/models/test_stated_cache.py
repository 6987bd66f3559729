"""`cache.dtype=auto` is what the checkpoint states, where a backend serves it; a note where none does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.config.build import Built, build
from kvcore.config.compose import compose
from kvcore.errors import ModelError
from kvcore.models.stated_cache import cache_statement
from kvcore.registry.loader import installed

# 4 layers of 2 KV heads of 64, keys and values: 1,024 elements a token.
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
FP8 = {"num_bits": 8, "type": "float", "dynamic": False}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def built(folder: Path, config: dict[str, Any], *overrides: str, beside: object = None) -> Built:
    (folder / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    asked = ["device=cpu", f"model.path={folder}", *overrides]
    return build(compose(asked, installed()), installed(), purpose="plan")


def bytes_a_token(made: Built) -> int:
    return sum(spec.content.bytes_per_token for spec in made.settings.facts.owned.values())


@pytest.mark.parametrize(
    "section",
    [
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {**FP8, "strategy": "tensor"},
            }
        },
        {"compression_config": {"kv_cache_scheme": FP8}},
        {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
        {"quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": "FP8"}},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "fp8"}},
        {"quantization_config": {"quant_method": "modelopt", **MODELOPT}},
        {"quantization_config": {"config_groups": {"group_0": {"targets": ["Linear"], "kv_cache_scheme": FP8}}}},
    ],
)
def test_every_form_is_followed(tmp_path: Path, section: dict[str, Any]) -> None:
    made = built(tmp_path, LLAMA | section)
    assert bytes_a_token(made) == 1024
    assert any("follows the checkpoint: fp8_e4m3" in note for note in made.notes)
    assert bytes_a_token(built(tmp_path, LLAMA | section, "cache.dtype=bfloat16")) == 2048


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    made = built(tmp_path, LLAMA, beside=MODELOPT)
    assert bytes_a_token(made) == 1024
    assert "quantization_config" in [r.field for r in made.settings.facts.refusals]
    # A cache alone leaves the weights as they are.
    made = built(tmp_path, LLAMA, beside={"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert bytes_a_token(made) == 1024
    assert made.settings.facts.refusals == ()
    made = built(tmp_path, LLAMA, beside={"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}})
    assert bytes_a_token(made) == 2048
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        built(tmp_path, LLAMA)


@pytest.mark.parametrize("level", ["text_config", "outer"])
def test_the_statement_may_lie_at_any_level(tmp_path: Path, level: str) -> None:
    section = {"quantization_config": {"kv_cache_scheme": FP8}}
    text = LLAMA | {"model_type": "gemma3_text", "sliding_window": 1024, "num_hidden_layers": 6}
    outer: dict[str, Any] = {"model_type": "gemma3", "text_config": text}
    (text if level == "text_config" else outer).update(section)
    assert bytes_a_token(built(tmp_path, outer)) == 6 * 2 * 2 * 64
    # A kind given by hand keeps its own: one layer in six is full.
    some = built(tmp_path, outer, "cache.dtype_by_kind.window=bfloat16")
    assert bytes_a_token(some) == (1 + 5 * 2) * 2 * 2 * 64


def test_whole_numbers_and_their_scales(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "int", "strategy": "token"}
    section = {"quantization_config": {"kv_cache_scheme": scheme}}
    # A float32 scale for each of 2 heads, for keys and values, in 4 layers.
    assert bytes_a_token(built(tmp_path, LLAMA | section)) == 1024 + 4 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, "stores no such cache"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "stores no such cache"),
        ({"kv_cache_scheme": {**FP8, "strategy": "channel"}}, "stores no such cache"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": False}}, "stores no such cache"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "no backend serves int4"),
    ],
)
def test_what_no_backend_serves_leaves_a_note(tmp_path: Path, section: dict[str, Any], says: str) -> None:
    made = built(tmp_path, LLAMA | {"quantization_config": section})
    assert bytes_a_token(made) == 2048
    assert [note for note in made.notes if says in note]


def test_a_backend_that_was_asked_for_decides(tmp_path: Path) -> None:
    section = {"quantization_config": {"kv_cache_scheme": FP8}}
    asked = ("backend=flash_attn", "device=h100-80gb", "cache.memory=1GiB")
    made = built(tmp_path, LLAMA | section, *asked)
    # FlashAttention 2 reads no fp8, FlashInfer does.
    assert bytes_a_token(made) == 2048
    assert any("flash_attn does not serve fp8_e4m3" in note for note in made.notes)
    made = built(tmp_path, LLAMA | section, "backend=flashinfer", *asked[1:])
    assert bytes_a_token(made) == 1024


def test_no_statement_says_nothing(tmp_path: Path) -> None:
    for nothing in (None, "auto", ""):
        made = built(tmp_path, LLAMA | {"quantization_config": {"quant_method": "x", "kv_cache_scheme": nothing}})
        assert bytes_a_token(made) == 2048
        assert not [note for note in made.notes if "checkpoint" in note]


@pytest.mark.parametrize("scheme", [8, [], True, {}, {"num_bits": "8"}, {"num_bits": True}, {"num_bits": 8, "type": 1}])
def test_a_malformed_scheme_is_refused(scheme: object) -> None:
    with pytest.raises(ModelError) as caught:
        cache_statement({"quantization_config": {"kv_cache_scheme": scheme}})
    assert caught.value.field == "quantization_config.kv_cache_scheme"


def test_two_schemes_are_refused() -> None:
    both = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    with pytest.raises(ModelError, match="two schemes"):
        cache_statement({"quantization_config": both, "hf_quant_config": MODELOPT})
