"""The engine in float16 through the emulations, beside torch in float16; two backends in one model."""

from __future__ import annotations

import pytest
import torch
from models.tiny import tiny_model
from support.engines import make_llm

import kvcore
from kvcore.cli import main
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.engine.settings import SamplingParams
from kvcore.errors import BackendUnavailableError, BackendUnsupportedError
from kvcore.registry.loader import installed
from kvcore.testing.oracle.tolerance import UNIT_ROUNDOFF

LENGTHS = (270, 60, 33, 7)
LIMITS = {"max_model_len": 300, "num_blocks": 40, "max_num_batched_tokens": 128, "max_num_seqs": 4}
PAGE = {"flash_attn": 256, "flashinfer": 16}


def sequences():
    torch.manual_seed(0)
    return [torch.randint(1, 250, (n,)).tolist() for n in LENGTHS]


def emulated(path, backend, **keys):
    return make_llm(
        path,
        dtype="float16",
        backend=backend,
        block_size=PAGE[backend],
        options={backend: {"emulate": True}},
        **LIMITS | keys,
    )


def plain(path, **keys):
    return make_llm(path, dtype="float16", backend="torch", **LIMITS | keys)


def allowed(reference: torch.Tensor, layers: int) -> float:
    """The kit allows attention 4 roundings of float16; those of several layers add like independent ones."""
    return 4 * UNIT_ROUNDOFF["float16"] * layers**0.5 * float(reference.abs().max())


def compare(mine, theirs, layers):
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        error, limit = float((a - b).abs().max()), allowed(b, layers)
        print(f"logits off by {error:.4g}, allowed {limit:.4g}")
        assert error <= limit, (error, limit)


@pytest.mark.parametrize("backend", PAGE)
def test_teacher_forced_logits_in_float16(backend, tmp_path_factory):
    path = tiny_model("llama_64", tmp_path_factory.getbasetemp())
    texts = sequences()
    prompts = [max(1, len(t) - 12) for t in texts]
    mine = emulated(path, backend)
    assert set(mine.backends.values()) == {backend}
    compare(mine.score(texts, prompt_lens=prompts), plain(path).score(texts, prompt_lens=prompts), 2)


def greedy(llm, prompts, new):
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    requests = [llm.core.add_request(str(i), p, sampling) for i, p in enumerate(prompts)]
    while llm.core.has_unfinished:
        llm.core.step()
    llm.core.manager.check_integrity()
    return [r.output_ids for r in requests]


def require_same_tokens(mine, reference, prompts, new, layers):
    """Equal greedy tokens, up to the first position where the reference's two best lie near each other."""
    theirs = greedy(reference, prompts, new)
    texts = [p + t for p, t in zip(prompts, theirs, strict=True)]
    logits = reference.score(texts, prompt_lens=[len(p) for p in prompts])
    for prompt, a, b, rows in zip(prompts, greedy(mine, prompts, new), theirs, logits, strict=True):
        differs = [n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        if differs:
            best = rows[len(prompt) - 1 + differs[0]].topk(2).values
            assert float(best[0] - best[1]) <= 2 * allowed(rows, layers), f"token {differs[0]}"


@pytest.mark.parametrize("backend", PAGE)
def test_greedy_tokens_are_equal_up_to_a_near_tie(backend, tmp_path_factory):
    path = tiny_model("llama_64", tmp_path_factory.getbasetemp())
    prompts = [t[:n] for t, n in zip(sequences(), (250, 40, 20, 5), strict=True)]
    require_same_tokens(emulated(path, backend), plain(path), prompts, 16, 2)


@pytest.mark.parametrize("backend", PAGE)
def test_windows_on_one_backend_and_full_layers_on_another(backend, tmp_path_factory):
    """A gemma3-like model: each backend with an option of its own."""
    path = tiny_model("gemma3_64", tmp_path_factory.getbasetemp())
    # Their layers share bytes: all field-first, or none.
    layout = {"flash_attn": "kv_first", "flashinfer": "hnd"}[backend]
    overrides = [
        f"model.path={path}",
        "model.dtype=float16",
        "device=cpu",
        "backend=torch",
        f"backend_by_kind.window={backend}",
        f"backends.{backend}.emulate=true",
        f"cache.block_size={PAGE[backend]}",
        "cache.num_blocks=200",
        f"backends.torch.layout={layout}",
        "engine.max_model_len=300",
        "engine.max_num_seqs=4",
        "engine.max_num_batched_tokens=128",
    ]
    if backend == "flashinfer":
        overrides.append("backends.flashinfer.layout=hnd")
    composed = build(compose(overrides, installed()), installed(), purpose="run").settings.backend
    assert composed.by_kind["window"] == backend
    assert composed.options["torch"].layout == layout
    assert composed.options[backend].emulate is True
    llm = kvcore.LLM(*overrides)
    groups = llm.plan.configs[0].kv_cache_groups
    found = {(g.spec.kind, g.backend, g.layout.layout.name) for g in groups}
    assert found == {("window", backend, layout), ("full", "torch", layout)}
    texts = sequences()
    prompts = [max(1, len(t) - 12) for t in texts]
    reference = plain(path, num_blocks=200).score(texts, prompt_lens=prompts)
    compare(llm.score(texts, prompt_lens=prompts), reference, 6)
    llm.core.manager.check_integrity()


@pytest.mark.parametrize("backend", PAGE)
def test_without_package_or_device_run_ends_in_a_typed_error(backend, tmp_path_factory, capsys):
    path = tiny_model("llama_64", tmp_path_factory.getbasetemp())
    status = main(
        [
            "run",
            "--prompt",
            "x",
            f"model.path={path}",
            "device=cpu",
            f"backend={backend}",
            "model.dtype=float16",
            "output=json",
        ]
    )
    said = capsys.readouterr().out
    assert status == 2
    assert f"backends.{backend}.emulate=true" in said
    with pytest.raises((BackendUnsupportedError, BackendUnavailableError), match=r"cuda|flash_attn_2_cuda"):
        make_llm(path, dtype="float16", backend=backend)


def test_sinks_are_refused_where_a_model_has_them(tmp_path_factory):
    path = tiny_model("gpt_oss", tmp_path_factory.getbasetemp())
    with pytest.raises(BackendUnsupportedError, match="FlashAttention 2 has no sinks"):
        make_llm(path, dtype="float16", backend="flash_attn", options={"flash_attn": {"emulate": True}})


@pytest.mark.long
@pytest.mark.parametrize("backend", PAGE)
def test_the_main_job_in_float16(backend):
    """SmolLM2 with its chat prompts: logits at every position, and greedy tokens, as torch in float16."""
    from support.mt_bench import first_turns

    from kvcore.models.home import ensure_model

    smollm2 = ensure_model()
    keys = {"max_model_len": 512, "num_blocks": 600, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    mine, theirs = emulated(smollm2, backend, **keys), plain(smollm2, **keys)
    prompts = [theirs.tokenizer.encode(p, chat=True) for p in first_turns(4)]
    texts = [p + p[:16] for p in prompts]
    lens = [len(p) for p in prompts]
    compare(mine.score(texts, prompt_lens=lens), theirs.score(texts, prompt_lens=lens), 30)
    require_same_tokens(mine, theirs, prompts, 24, 30)


def test_sinks_go_through_triton_beside_torch(tmp_path_factory):
    """A gpt-oss-like model, whose sinks both libraries refuse: window layers interpreted, full ones torch."""
    path = tiny_model("gpt_oss", tmp_path_factory.getbasetemp())
    overrides = [
        f"model.path={path}",
        "model.dtype=float32",
        "device=cpu",
        "backend=torch",
        "backend_by_kind.window=triton",
        "backends.triton.interpret=true",
        "backends.torch.layout=hnd",
        "cache.block_size=16",
        "cache.num_blocks=60",
        "engine.max_model_len=64",
        "engine.max_num_seqs=2",
        "engine.max_num_batched_tokens=32",
    ]
    composed = build(compose(overrides, installed()), installed(), purpose="run").settings.backend
    assert composed.options["triton"].interpret is True
    assert composed.options["torch"].layout == "hnd"
    llm = kvcore.LLM(*overrides)
    assert {(g.spec.kind, g.backend) for g in llm.plan.configs[0].kv_cache_groups} == {
        ("window", "triton"),
        ("full", "torch"),
    }
    texts = [t[:n] for t, n in zip(sequences(), (19,), strict=False)]
    prompts = [len(t) - 1 for t in texts]
    reference = make_llm(path, backend="torch", max_model_len=64, num_blocks=60)
    for a, b in zip(llm.score(texts, prompt_lens=prompts), reference.score(texts, prompt_lens=prompts), strict=True):
        assert float((a - b).abs().max()) <= 1e-4
