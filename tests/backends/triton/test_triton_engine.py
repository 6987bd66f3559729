"""The main job in miniature: whole models on interpreted kernels give the torch backend's logits."""

import pytest
import torch
from models.tiny import tiny_model
from support.engines import make_llm

pytest.importorskip("triton")
# One iteration a tile: what several iterations and splits do is the kit's business.
INTERPRETED = {"triton": {"interpret": True, "block_n": 64, "num_splits": 1}}


def scores(path, texts, **keys):
    llm = make_llm(path, max_model_len=64, num_blocks=40, block_size=16, max_num_batched_tokens=32, **keys)
    return llm.score(texts, prompt_lens=[len(t) - 16 for t in texts])


def compare(name, folder, lengths, tolerance, **keys):
    path = tiny_model(name, folder)
    torch.manual_seed(0)
    texts = [torch.randint(1, 250, (n,)).tolist() for n in lengths]
    got = scores(path, texts, backend="triton", options=INTERPRETED, **keys)
    want = scores(path, texts, backend="torch", **keys)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert float((mine - theirs).abs().max()) < tolerance


@pytest.mark.parametrize(("name", "lengths"), [("llama", (25, 19)), ("gemma3", (27,))])
def test_logits_are_those_of_torch(name, lengths, tmp_path_factory):
    """16 tokens decoded one by one after the prompt, with windows where the model has them."""
    compare(name, tmp_path_factory.getbasetemp(), lengths, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_soft_cap_sinks_and_longer_llama(name, tmp_path_factory):
    compare(name, tmp_path_factory.getbasetemp(), (38, 21), 1e-4)
