"""The bytes of the weights: of those files that are loaded, in the type in which they will lie in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import reference_model, tiny_model
from safetensors.torch import save_file

from kvcore.errors import ModelError
from kvcore.models.weights import INDEX, SINGLE, weight_bytes


def count(folder: Path, dtype: str = "bfloat16", *, tied: bool = False, quantized: bool = False) -> int | None:
    return weight_bytes(folder, dtype, tied=tied, quantized=quantized)


def sharded(folder: Path, **files: dict[str, torch.Tensor]) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    named = {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": named}))


def test_a_second_copy_is_not_counted(tmp_path: Path) -> None:
    a, b = torch.zeros(100, 10, dtype=torch.bfloat16), torch.ones(7, dtype=torch.bfloat16)
    sharded(tmp_path, one={"a": a}, two={"b": b})
    assert count(tmp_path) == 2 * 1007
    save_file({"a": a, "b": b}, tmp_path / "consolidated.safetensors")
    save_file({"lora": a}, tmp_path / "adapter_model.safetensors")
    save_file({"a": a}, tmp_path / "model.fp16.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 999)
    assert count(tmp_path) == 2 * 1007
    # transformers looks for the one file first.
    save_file({"a": a}, tmp_path / SINGLE)
    assert count(tmp_path) == 2 * 1000


def test_without_a_checkpoint_nothing_is_known(tmp_path: Path) -> None:
    assert count(tmp_path) is None
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    assert count(tmp_path) is None


def test_numbers_take_the_models_type_and_integers_their_own(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.zeros(3, dtype=torch.float64),
        "f32": torch.zeros(5),
        "f16": torch.zeros(7, dtype=torch.float16),
        "e4m3": torch.zeros(11, dtype=torch.float8_e4m3fn),
        "i64": torch.zeros(2, dtype=torch.int64),
        "u8": torch.zeros(13, dtype=torch.uint8),
        "flag": torch.zeros(4, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / SINGLE)
    stored = 2 * 8 + 13 + 4
    assert count(tmp_path, "float32") == 4 * (3 + 5 + 7 + 11) + stored
    assert count(tmp_path, "bfloat16") == 2 * (3 + 5 + 7 + 11) + stored
    # Of quantized weights, narrow floats are codes.
    assert count(tmp_path, "bfloat16", quantized=True) == 2 * (3 + 5 + 7) + 11 + stored


def test_an_output_tied_to_the_embeddings_is_loaded_once(tmp_path: Path) -> None:
    embeddings = torch.randn(500, 64)
    sharded(
        tmp_path,
        one={"model.embed_tokens.weight": embeddings, "x": torch.zeros(3)},
        two={"lm_head.weight": embeddings.clone()},
    )
    both, once = 4 * (2 * 500 * 64 + 3), 4 * (500 * 64 + 3)
    assert count(tmp_path, "float32", tied=True) == once
    assert count(tmp_path, "float32", tied=False) == both
    # Told to be tied, and unlike: transformers keeps both.
    save_file({"lm_head.weight": embeddings + 1}, tmp_path / "two.safetensors")
    assert count(tmp_path, "float32", tied=True) == both


@pytest.mark.parametrize("name", ["llama", "gemma", "mixtral", "gpt_oss"])
def test_tiny_checkpoints_count_what_is_loaded(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    tied = bool(json.loads((path / "config.json").read_text()).get("tie_word_embeddings"))
    loaded = sum(p.numel() * 4 for p in reference_model(path).parameters())
    assert count(path, "float32", tied=tied) == loaded
    assert count(path, "float16", tied=tied) == loaded // 2


def test_the_default_model_counts_what_is_loaded() -> None:
    from kvcore.models.home import ensure_model

    # 134,515,008 weights, as tests/config/test_build.py has them by hand.
    assert count(ensure_model(), "float32", tied=True) == 4 * 134_515_008


def test_plan_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvcore.cli import main

    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sharded(tmp_path, one={"a": torch.zeros(4 << 20, dtype=torch.bfloat16)})
    save_file({"a": torch.zeros(4 << 20, dtype=torch.bfloat16)}, tmp_path / "consolidated.safetensors")
    for dtype, weights in (("auto", 8 << 20), ("float32", 16 << 20)):
        assert main(["plan", f"model.path={tmp_path}", "device=h100-80gb", f"model.dtype={dtype}", "output=json"]) == 0
        (terms,) = json.loads(capsys.readouterr().out)["device_memory"]
        assert terms["weights"] == weights


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header should take"),
        (b"\x10\0\0\0\0\0\0\0{}", "header should take"),
        (b"\x02\0\0\0\0\0\0\0{]", "not readable"),
        (b'\x21\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1]}} ', "not readable"),
        (b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}   ', "of"),
    ],
)
def test_a_file_that_cannot_be_read_says_which(tmp_path: Path, content: bytes, says: str) -> None:
    sharded(tmp_path, one={"a": torch.zeros(3)}, two={"b": torch.zeros(3)})
    (tmp_path / "two.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"two\.safetensors .*{says}"):
        count(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match="files that are missing") as caught:
        count(tmp_path)
    assert caught.value.got == ["two.safetensors"]
    (tmp_path / "two.safetensors").mkdir()
    with pytest.raises(ModelError):
        count(tmp_path)


@pytest.mark.parametrize(
    "content",
    ['{"weight_map": {"a": 5}}', '{"weight_map": []}', '{"weight_map": {"a": null}}', "[]", "{", "[" * 100_000],
)
def test_a_damaged_index_is_a_typed_error(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=INDEX):
        count(tmp_path)


def test_layers_beyond_the_models_own_are_not_loaded(tmp_path: Path) -> None:
    """DeepSeek-V3 keeps a layer 61 of 61, which predicts further tokens; a vision tower counts its own layers."""
    ten = torch.zeros(10, dtype=torch.bfloat16)
    names = ["model.layers.0.w", "model.layers.1.w", "model.layers.2.w", "model.language_model.layers.10.w"]
    save_file({n: ten.clone() for n in [*names, "model.visual.layers.7.w", "lm_head.w"]}, tmp_path / SINGLE)
    assert weight_bytes(tmp_path, "bfloat16", tied=False, quantized=False) == 6 * 20
    assert weight_bytes(tmp_path, "bfloat16", tied=False, quantized=False, layers=2) == 4 * 20
