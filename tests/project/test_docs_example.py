"""The backend of the docs is a real one: with its own content and retention it generates what torch does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvcore.attention.query import AttentionQuery, Mask
from kvcore.errors import ConfigError, PluginError
from kvcore.models.stored_as import stored_as
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource, installed_sources
from kvcore.registry.registry import Registry
from kvcore.spec.retention import Retention, Window


@pytest.fixture
def registry(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The installed plugins and the example's."""
    monkeypatch.syspath_prepend(str(repo / "docs" / "examples" / "kvcore-example"))
    source = PluginSource("example", "kvcore-example", "1.0", lambda: import_module("kvcore_example.plugin"))
    yield load([*installed_sources(), source])
    for name in [n for n in sys.modules if n.startswith("kvcore_example")]:
        del sys.modules[name]


def test_it_is_installed_like_any_other(registry: Registry) -> None:
    assert "example" in registry.backends
    assert "normed_kv" in registry.contents
    assert "lazy_window" in registry.retentions
    (record,) = [r for r in registry.plugins if r.name == "example"]
    assert record.reason is None


@pytest.mark.parametrize(
    ("feature", "field"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"mask": Mask(causal=False)}, "bidirectional"),
        ({"head_dim": 18}, "head_dim"),
    ],
)
def test_it_refuses_what_it_does_not_know(registry: Registry, feature: dict[str, Any], field: str) -> None:
    spec = registry.backends["example"]
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 16} | feature
    query = AttentionQuery("kv", "float32", "float32", **facts)
    assert spec.unsupported(query, spec.Config()).field == field


def stored(settings: Any, registry: Registry, **kinds: str) -> Any:
    """Settings as `cache.content=` and `cache.retention=` make them."""
    known = {"contents": registry.contents, "retentions": registry.retentions}
    return replace(settings, facts=stored_as(settings.facts, **known, **kinds))


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama", {}),
        ("llama", {"content": "normed_kv"}),
        ("mistral_window", {"retention": "lazy_window"}),
        ("qwen2_window", {"content": "normed_kv", "retention": "lazy_window"}),
    ],
)
def test_it_generates_what_torch_does(
    registry: Registry, model: str, kinds: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from models.tiny import tiny_model
    from support.engines import engine_settings

    from kvcore.engine.llm import LLM

    path = tiny_model(model, tmp_path_factory.getbasetemp())
    texts = [[5, 9, 200, 31, 7] * 30, [17] * 3, [44, 2, 91] * 7]
    limits = {"max_model_len": 160, "num_blocks": 80, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    scores = {}
    for backend in ("torch", "example"):
        settings = engine_settings(path, backend=backend, **limits)
        if backend == "example":
            settings = stored(settings, registry, **kinds)
        llm = LLM(settings, registry)
        scores[backend] = llm.score(texts, prompt_lens=[20, 1, 10])
        llm.core.manager.check_integrity()
    groups = llm.plan.configs[0].kv_cache_groups
    assert kinds.get("content", "kv") in {g.spec.content.kind for g in groups}
    assert kinds.get("retention", groups[0].spec.kind) in {g.spec.kind for g in groups}
    for mine, theirs in zip(scores["example"], scores["torch"], strict=True):
        assert float((mine - theirs).abs().max()) < 1e-4


def test_nobody_else_serves_its_content(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> None:
    from models.tiny import tiny_model
    from support.engines import engine_settings

    from kvcore.engine.planning import prepare_plan
    from kvcore.errors import BackendUnsupportedError

    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    plain = engine_settings(path, backend="torch")
    settings = stored(plain, registry, content="normed_kv")
    with pytest.raises(BackendUnsupportedError) as caught:
        prepare_plan(settings, registry, purpose="run")
    assert (caught.value.field, caught.value.got) == ("content", "normed_kv")
    with pytest.raises(ConfigError) as nothing:
        stored(plain, registry, retention="lazy_window")  # llama has no window
    assert nothing.value.field == "cache.retention"
    with pytest.raises(ConfigError) as unknown:
        stored(plain, registry, content="norm_kv")
    assert "normed_kv" in unknown.value.allowed


def test_a_retention_that_gives_up_too_much_is_caught(
    registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from models.tiny import tiny_model
    from support.engines import engine_settings

    class Shorter(Window):
        kind = "shorter"

        @classmethod
        def instead_of(cls, retention: Retention) -> Retention | None:
            return cls(retention.size - 1) if isinstance(retention, Window) else None

    registry.retentions["shorter"] = Shorter
    settings = engine_settings(tiny_model("mistral_window", tmp_path_factory.getbasetemp()))
    with pytest.raises(PluginError, match="still reads"):
        stored(settings, registry, retention="shorter")


@pytest.mark.parametrize("size", [1, 5, 16, 40])
def test_its_retention_keeps_its_bounds(registry: Registry, size: int) -> None:
    """Against counting: every block from the first needed token to the last token of the step."""
    block, sequences = 8, 3
    retention = registry.retentions["lazy_window"](size, 24)
    for start in range(200):
        for scheduled in (1, 7, 8, 30):
            end = start + scheduled
            held = -(-end // block) - retention.first_needed(start) // block
            kept = -(-end // block) - retention.first_needed(end) // block
            assert held <= retention.blocks_for_step(end, scheduled, block)
            assert kept <= retention.resident_blocks(end, block)
            budget = retention.step_budget(scheduled * sequences, block, sequences)
            extra = retention.blocks_for_step(end, scheduled, block) - retention.resident_blocks(end, block)
            assert extra * sequences <= budget
