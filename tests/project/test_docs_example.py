"""The backend of the docs is a real one: it loads as a plugin and generates what the torch backend does."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvcore.attention.query import AttentionQuery, Mask
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource, installed_sources
from kvcore.registry.registry import Registry


@pytest.fixture
def registry(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The installed plugins and the example's."""
    monkeypatch.syspath_prepend(str(repo / "docs" / "examples"))
    source = PluginSource("example", "kvcore-example", "1.0", lambda: import_module("kvcore_example.plugin"))
    yield load([*installed_sources(), source])
    for name in [n for n in sys.modules if n.startswith("kvcore_example")]:
        del sys.modules[name]


def test_it_is_installed_like_any_other(registry: Registry) -> None:
    assert "example" in registry.backends
    (record,) = [r for r in registry.plugins if r.name == "example"]
    assert record.reason is None


@pytest.mark.parametrize(
    ("feature", "field"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"mask": Mask(causal=False)}, "bidirectional"),
    ],
)
def test_it_refuses_what_it_does_not_know(registry: Registry, feature: dict[str, object], field: str) -> None:
    spec = registry.backends["example"]
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 16}
    query = AttentionQuery("kv", "float32", "float32", **facts, **feature)  # type: ignore[arg-type]
    assert spec.unsupported(query, spec.Config()).field == field


def test_it_passes_the_conformance_kit(registry: Registry) -> None:
    from kvcore.testing import run

    results = run(registry.backends["example"])
    assert not [(r.case.id, r.reason) for r in results if r.outcome == "failed"]
    passed = [r.case.id for r in results if r.outcome == "passed"]
    assert len(passed) > 50
    assert any("window" in name for name in passed)


@pytest.mark.parametrize("model", ["llama", "mistral_window", "qwen2_window"])
def test_it_generates_what_torch_does(
    registry: Registry, model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from models.tiny import tiny_model
    from support.engines import engine_settings

    from kvcore.engine.llm import LLM

    path = tiny_model(model, tmp_path_factory.getbasetemp())
    texts = [[5, 9, 200, 31, 7] * 9, [17] * 3, [44, 2, 91] * 7]
    settings = {"max_model_len": 96, "num_blocks": 60, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    scores = {}
    for backend in ("torch", "example"):
        llm = LLM(engine_settings(path, backend=backend, **settings), registry)
        scores[backend] = llm.score(texts, prompt_lens=[20, 1, 10])
    for mine, theirs in zip(scores["example"], scores["torch"], strict=True):
        assert float((mine - theirs).abs().max()) < 1e-4
