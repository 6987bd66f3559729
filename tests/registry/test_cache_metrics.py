"""What the metrics plugin makes of cache events: counts, and how long sampled blocks stayed."""

from __future__ import annotations

import json

import pytest
from kvcore_metrics.residency import Residency
from prometheus_client.parser import text_string_to_metric_families

from kvcore.errors import ConfigError
from kvcore.manage.watch.events import Cleared, Removed, Stored
from kvcore.registry.loader import load
from kvcore.registry.records import installed_sources

LOW, HIGH = b"\x00" * 32, b"\xff" * 32  # digests within a small share, and outside of it


@pytest.fixture
def registry():
    made = load([s for s in installed_sources() if s.name == "metrics"])
    yield made
    made.configure({"metrics": made.options["metrics"]()})  # closes the files


def test_residency_by_hand() -> None:
    now = [10.0]
    residency = Residency(0.5, lambda: now[0])
    assert (
        residency.hear([Stored(0, LOW, 1, None, (1,)), Stored(0, HIGH, 2, None, (2,)), Stored(1, LOW, 3, None, (1,))])
        == []
    )
    now[0] = 12.5
    assert residency.hear([Removed(0, LOW, 1), Removed(0, HIGH, 2)]) == [2.5]
    now[0] = 13.0
    assert residency.hear([Cleared(), Stored(1, LOW, 3, None, (1,))]) == []
    now[0] = 14.0
    assert residency.hear([Removed(1, LOW, 3)]) == [1.0]
    assert Residency(0).hear([Stored(0, LOW, 1, None, (1,)), Removed(0, LOW, 1)]) == []
    assert Residency(1, lambda: 1.0).hear([Stored(0, HIGH, 1, None, (1,)), Removed(0, HIGH, 1)]) == [0.0]


def test_events_become_counts_and_a_histogram(registry, tmp_path) -> None:
    lines, prom = tmp_path / "steps.jsonl", tmp_path / "kvcore.prom"
    options = registry.options["metrics"](jsonl=str(lines), prometheus=str(prom), residency=1.0)
    registry.configure({"metrics": options})
    registry.cache_changed([Stored(0, LOW, 1, None, (1,)), Stored(0, HIGH, 2, LOW, (2,))])
    registry.cache_changed([Removed(0, HIGH, 2)])
    registry.cache_changed([])  # nobody is told of nothing
    registry.cache_changed([Cleared()])
    registry.step_finished({"step": 1, "seconds": 0.1, "scheduled_tokens": 300, "evictions": 1, "blocks_cached": 1})
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(r["blocks_stored"], r["blocks_removed"], r["cache_cleared"]) for r in rows[:3]] == [
        (2, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
    ]
    assert len(rows[1]["residency_seconds"]) == 1
    assert rows[1]["residency_seconds"][0] >= 0
    samples = [s for f in text_string_to_metric_families(prom.read_text()) for s in f.samples]
    values = {s.name: s.value for s in samples if not s.labels}
    assert values["kvcore_blocks_stored_total"] == 2
    assert values["kvcore_blocks_removed_total"] == 1
    assert values["kvcore_cache_cleared_total"] == 1
    assert values["kvcore_block_residency_seconds_count"] == 1
    assert values["kvcore_evictions_total"] == 1
    assert values["kvcore_blocks_cached"] == 1
    buckets = {s.labels["le"]: s.value for s in samples if s.name == "kvcore_step_tokens_bucket"}
    assert (buckets["256.0"], buckets["1024.0"]) == (0, 1)


def test_a_share_beyond_one_is_refused(registry) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.options["metrics"](residency=1.5)
    assert caught.value.field == "plugins.metrics.residency"
