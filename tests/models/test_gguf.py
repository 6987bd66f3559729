"""The converter on a GGUF file written here, with weights whose answer transformers knows."""

import json

import numpy as np
import pytest
import torch
from models.tiny import reference_model, tiny_model
from models.tiny_specs import SMALL, SPECS

from kvcore.errors import ModelError
from kvcore.models.gguf import convert
from kvcore.models.weights import read_header, weight_bytes

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(weight, heads):
    """transformers' order of rotary rows to llama.cpp's, one row at a time."""
    out, dim = np.empty_like(weight), weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + i + dim // 2]
    return out


def write_gguf(path, state, *, architecture="llama", pre="smollm"):
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    tokens = ["<|end|>", *(chr(i) for i in range(33, 33 + 94)), "ab"]
    tokens += [f"unused{i}" for i in range(256 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 255)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in state.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_state(model):
    """A tiny Llama's weights as llama.cpp names and orders them; big matrices quantized to Q8_0."""
    found = {}
    for label, tensor in model.state_dict().items():
        value = tensor.numpy().astype(np.float32)
        if label.startswith("model.layers."):
            layer, rest = label.removeprefix("model.layers.").split(".", 1)
            part = NAMES[rest.removesuffix(".weight")]
            if part in ("attn_q", "attn_k"):
                value = interleave(value, {"attn_q": 4, "attn_k": 2}[part])
            found[f"blk.{layer}.{part}.weight"] = value
        else:
            top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
            found[f"{top.get(label, 'output')}.weight"] = value
    return found


def silent(what, fraction):
    assert 0.0 <= fraction <= 1.0


def test_converted_model_is_the_same_model(tmp_path, tmp_path_factory):
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    original = reference_model(path)
    source = write_gguf(tmp_path / "a.gguf", gguf_state(original))
    convert(source, tmp_path / "out", silent)
    converted = reference_model(tmp_path / "out")
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.allclose(original(ids).logits, converted(ids).logits, atol=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["head_dim"], config["tie_word_embeddings"]) == (16, False)
    assert np.float32(config["rms_norm_eps"]) == np.float32(1e-6)
    assert "quantization_config" not in config
    ended = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (ended["bos_token_id"], ended["eos_token_id"]) == (0, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_inputs_matrix_is_stored_under_its_own_name(tied, tmp_path, monkeypatch):
    """Tied, the outputs have none: readers beside transformers look for the inputs' name alone."""
    monkeypatch.setitem(SPECS, f"llama_tied_{tied}", ("LlamaConfig", dict(SMALL, tie_word_embeddings=tied)))
    original = reference_model(tiny_model(f"llama_tied_{tied}", tmp_path))
    state = gguf_state(original)
    if tied:
        del state["output.weight"]  # as llama.cpp writes it
    convert(write_gguf(tmp_path / "a.gguf", state), tmp_path / "out", silent)
    converted = reference_model(tmp_path / "out")
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.allclose(original(ids).logits, converted(ids).logits, atol=1e-6)
    assert converted.config.tie_word_embeddings == tied
    stored = read_header(tmp_path / "out" / "model.safetensors")
    wide = {n for n, entry in stored.items() if entry["shape"] == [256, 64]}
    assert wide == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    loaded = sum(p.numel() * p.element_size() for p in converted.parameters())
    assert weight_bytes(tmp_path / "out", "float32", tied=tied, quantized=False) == loaded


def test_quantized_weights_lose_nothing_more(tmp_path, tmp_path_factory):
    import gguf

    original = reference_model(tiny_model("llama", tmp_path_factory.getbasetemp()))
    state = gguf_state(original)
    weight = state["blk.0.ffn_up.weight"]
    file = tmp_path / "q.gguf"
    packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    exact = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    write_gguf(file, {**state, "blk.0.ffn_up.weight": exact})
    convert(file, tmp_path / "out", silent)
    got = reference_model(tmp_path / "out").state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    assert np.array_equal(got, exact)
    # float16 or bfloat16 would not hold these values.
    assert not np.array_equal(exact.astype(np.float16).astype(np.float32), exact)


def test_tokenizer_of_the_file(tmp_path, tmp_path_factory):
    from kvcore.models.tokenizer import Tokenizer

    original = reference_model(tiny_model("llama", tmp_path_factory.getbasetemp()))
    convert(write_gguf(tmp_path / "t.gguf", gguf_state(original)), tmp_path / "out", silent)
    tokenizer = Tokenizer.load(tmp_path / "out")
    # "ab" is merged, every digit stands alone, special tokens are found and left out of text.
    assert tokenizer.encode("ab12<|end|>", chat=False) == [95, ord("1") - 32, ord("2") - 32, 0]
    assert tokenizer.decode([95, 0]) == "ab"
    assert tokenizer.encode("ab", chat=True) == [95]
    assert tokenizer.eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"architecture": "mamba"}, "general.architecture"), ({"pre": "tekken"}, "tokenizer.ggml.pre")],
)
def test_files_that_the_converter_does_not_know(options, field, tmp_path):
    file = write_gguf(tmp_path / "x.gguf", {"token_embd.weight": np.zeros((4, 4), np.float32)}, **options)
    with pytest.raises(ModelError) as raised:
        convert(file, tmp_path / "out", silent)
    assert raised.value.field == field


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(ModelError, match=r"x\.gguf is no GGUF file"):
        convert(tmp_path / "x.gguf", tmp_path / "out", silent)


def test_a_file_that_lacks_a_tensor(tmp_path, tmp_path_factory):
    state = gguf_state(reference_model(tiny_model("llama", tmp_path_factory.getbasetemp())))
    del state["blk.1.ffn_up.weight"]
    file = write_gguf(tmp_path / "x.gguf", state)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        convert(file, tmp_path / "out", silent)
