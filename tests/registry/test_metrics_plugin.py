"""The observer plugin, through its hooks alone."""

import json

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from kvcore.errors import ConfigError
from kvcore.registry.loader import load
from kvcore.registry.records import installed_sources

STEP = {
    "step": 0,
    "seconds": 0.03,
    "scheduled_tokens": 7,
    "num_running": 2,
    "num_waiting": 1,
    "preemptions": 0,
    "blocks_used": 5,
    "blocks_total": 63,
    "prefix_hit_tokens": 16,
    "prompt_tokens": 40,
    "output_tokens": 2,
    "copied_blocks": 1,
}


@pytest.fixture
def registry():
    made = load([s for s in installed_sources() if s.name == "metrics"])
    yield made
    made.configure({"metrics": made.options["metrics"]()})  # closes the files


def configure(registry, **options):
    registry.configure({"metrics": registry.options["metrics"](**options)})


def samples(path):
    families = text_string_to_metric_families(path.read_text())
    return {s.name: s.value for f in families for s in f.samples if not s.labels}


def test_nothing_is_written_unless_asked_for(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configure(registry)
    registry.step_finished(STEP)
    assert list(tmp_path.iterdir()) == []


def test_json_lines_are_complete_after_every_step(registry, tmp_path):
    path = tmp_path / "steps.jsonl"
    configure(registry, jsonl=str(path))
    for step in range(3):
        registry.step_finished({**STEP, "step": step})
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(step + 1))
    assert {k: lines[0][k] for k in STEP} == STEP


def test_prometheus_text_adds_up_and_survives_a_new_engine(registry, tmp_path):
    path = tmp_path / "kvcore.prom"
    configure(registry, prometheus=str(path))
    registry.step_finished(STEP)
    registry.step_finished({**STEP, "step": 1, "output_tokens": 4, "blocks_used": 9, "seconds": 0.3})
    values = samples(path)
    assert values["kvcore_output_tokens_total"] == 4  # a total since the start: not 2 + 4
    assert values["kvcore_scheduled_tokens_total"] == 14
    assert values["kvcore_blocks_used"] == 9
    assert values["kvcore_step_seconds_count"] == 2
    assert values["kvcore_step_seconds_sum"] == pytest.approx(0.33)
    registry.step_finished({**STEP, "output_tokens": 1})  # totals fell: another engine
    assert samples(path)["kvcore_output_tokens_total"] == 5
    assert not any(m.name.startswith("kvcore") for m in REGISTRY.collect())
    assert [p.name for p in tmp_path.iterdir()] == ["kvcore.prom"]


def test_a_path_that_cannot_be_written_is_a_typed_error_at_the_start(registry, tmp_path):
    for path in (tmp_path, tmp_path / "no" / "such" / "folder.prom"):
        with pytest.raises(ConfigError) as caught:
            configure(registry, prometheus=str(path))
        assert caught.value.field == "plugins.metrics.prometheus"
