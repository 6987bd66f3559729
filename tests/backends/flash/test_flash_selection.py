"""Which backends can serve which models on which devices, none of which need be here.

What is expected is written from the packages' own checks:

flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp): Ampere or newer, CUDA alone; fp16 and bf16; head dimension
at most 256; ALiBi slopes taken; no argument for sinks. Its README names Ampere, Ada and Hopper.
flashinfer 0.6.13: sm75 or newer, CUDA alone; the wrappers' `run` takes sinks, and the fa2 modules have no
parameter for them; ALiBi only with slopes of its own; latents by another wrapper.
"""

import json

import pytest
from cache_facts import config_of, fact_files

from kvcore.cli import main
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.config.priorities import priorities
from kvcore.engine.planning import select
from kvcore.registry.loader import installed
from kvcore.registry.priority import device_classes, rank

CONFIGS = {facts["name"]: config_of(facts) for facts in fact_files()}
NVIDIA, ELSEWHERE = ("h100-80gb", "b200-192gb"), ("mi300x-192gb", "cpu")
# Model -> backend -> the fact that refuses it on NVIDIA's devices, None where nothing does.
REFUSED_BY = {
    "gemma-3-4b-it": {"flash_attn": None, "flashinfer": None, "torch": None},
    "gpt-oss-20b": {"flash_attn": "sinks", "flashinfer": "sinks", "torch": None},
    "deepseek-v3": {"flash_attn": "content", "flashinfer": "content", "torch": "content"},
    "mpt-7b": {"flash_attn": None, "flashinfer": "alibi", "torch": None},
}
# Who goes first where libraries need not be installed.
FIRST = {
    ("gemma-3-4b-it", "h100-80gb"): "flash_attn",
    ("gemma-3-4b-it", "b200-192gb"): "flashinfer",
    ("gemma-3-4b-it", "mi300x-192gb"): "triton",
    ("gemma-3-4b-it", "cpu"): "torch",
    ("gpt-oss-20b", "h100-80gb"): "triton",
    ("gpt-oss-20b", "b200-192gb"): "triton",
    ("gpt-oss-20b", "cpu"): "torch",
    ("mpt-7b", "h100-80gb"): "flash_attn",
    ("mpt-7b", "b200-192gb"): "flash_attn",
    ("mpt-7b", "cpu"): "torch",
    ("deepseek-v3", "h100-80gb"): None,
    ("deepseek-v3", "cpu"): None,
}


@pytest.fixture
def model(tmp_path):
    def write(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        return folder

    return write


def classes(path, device, purpose):
    composed = compose([f"model.path={path}", "model.dtype=bfloat16", f"device={device}"], installed())
    settings = build(composed, installed(), purpose="plan").settings
    return select(settings, installed(), purpose=purpose, strict=False).classes


@pytest.mark.parametrize("device", NVIDIA)
@pytest.mark.parametrize("name", REFUSED_BY)
def test_candidates_on_nvidia(model, name, device):
    for row in classes(model(name), device, "plan"):
        found = {c.name: c for c in row.candidates}
        for backend, fact in REFUSED_BY[name].items():
            candidate = found[backend]
            if fact is None:
                assert candidate.status in ("chosen", "usable"), (row.kind, candidate)
            else:
                assert (candidate.status, candidate.verdict.reason.field) == ("unsupported", fact)


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize("name", REFUSED_BY)
def test_candidates_elsewhere(model, name, device):
    for row in classes(model(name), device, "plan"):
        found = {c.name: c for c in row.candidates}
        for backend in ("flash_attn", "flashinfer"):
            reason = found[backend].verdict.reason
            assert (found[backend].status, reason.field) == ("unsupported", "device")
            assert f"backends.{backend}.emulate=true" in str(reason.allowed)


@pytest.mark.parametrize(("name", "device"), FIRST)
def test_who_goes_first(model, name, device):
    rows = classes(model(name), device, "plan")
    assert {row.chosen.name if row.chosen else None for row in rows} == {FIRST[name, device]}


def test_kinds_of_gemma_3_and_gpt_oss(model):
    for name in ("gemma-3-4b-it", "gpt-oss-20b"):
        assert {row.kind for row in classes(model(name), "h100-80gb", "plan")} == {"full", "window"}


def test_what_is_missing_here_is_said_with_its_remedy(model, capsys):
    path = model("gpt-oss-20b")
    argv = ["backends", f"model.path={path}", "model.dtype=bfloat16", "device=h100-80gb", "output=json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    for group in document["groups"]:
        found = {c["name"]: c for c in group["candidates"]}
        assert found["flash_attn"]["reason"]["allowed"] == (
            "none: FlashAttention 2 has no sinks (FlashAttention 4 has, not built here)"
        )
        assert "ignore them" in found["flashinfer"]["reason"]["allowed"]
    assert main([*argv[:-1], "output=text"]) == 0
    text = capsys.readouterr().out
    assert "flash_attn" in text
    assert "sinks" in text


def test_an_emulation_is_called_one(model, capsys):
    argv = [
        "backends",
        f"model.path={model('gemma-3-4b-it')}",
        "model.dtype=bfloat16",
        "device=cpu",
        "backend=flashinfer",
        "backends.flashinfer.emulate=true",
    ]
    assert main([*argv, "output=json"]) == 0
    for group in json.loads(capsys.readouterr().out)["groups"]:
        proofs = {c["name"]: (c["status"], c["proof"]) for c in group["candidates"]}
        assert proofs["flashinfer"] == ("chosen", "emulated")
        assert proofs["torch"] == ("usable", "device")
    assert main(argv) == 0
    assert "emulated: a stand-in runs, not the device's kernels" in capsys.readouterr().out


def test_an_explicit_choice_that_cannot_serve_names_the_nearest_usable_one(model, capsys):
    argv = [
        "plan",
        f"model.path={model('mpt-7b')}",
        "model.dtype=bfloat16",
        "device=h100-80gb",
        "backend=flashinfer",
        "output=json",
    ]
    assert main(argv) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "BackendUnsupportedError"
    assert (error["field"], error["got"]) == ("alibi", True)
    assert "backend=flash_attn" in error["remedy"]


def test_ranks_come_from_the_narrowest_class_and_data_go_before_declarations():
    from kvcore.attention.declaration import DeviceFacts

    blackwell, hopper = (DeviceFacts("cuda", capability=(n, 0)) for n in (10, 9))
    assert device_classes(blackwell) == ("cuda:sm100", "cuda:sm10x", "cuda")
    assert device_classes(DeviceFacts("rocm", arch="gfx942:sramecc+")) == ("rocm:gfx942", "rocm")
    spec = installed().backends["flash_attn"]
    declared = type("Third", (spec,), {"priority": {"cuda": 5, "cuda:sm9x": 6, "cuda/window": 7}, "name": "third"})
    assert [rank(declared, d, k, {}) for d in (blackwell, hopper) for k in ("full", "window")] == [5, 7, 6, 6]
    assert rank(declared, hopper, "full", {"cuda:sm90": {"third": 9}}) == 9
    assert rank(declared, hopper, "full", {"cuda:sm90": {"other": 9}}) == 6
    assert rank(declared, DeviceFacts("cpu"), "full", {}) == 0
    assert priorities()["cuda:sm10x"]["flashinfer"] > spec.priority["cuda"]
