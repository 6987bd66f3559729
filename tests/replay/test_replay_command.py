"""`kvcore replay`: the document, the series, the picture; what is refused; and that no model is near."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.replays import DATA, LLAMA

from kvcore.cli import main
from kvcore.replay.series import Sample

CONVERSATION = DATA / "traces/mooncake_conversation_200.jsonl"
AZURE = DATA / "traces/azure_conv_300.csv"
SIZED = [f"model.path={LLAMA}", "model.dtype=bfloat16", "device=h100-80gb", "cache.memory=16GiB", "cache.block_size=64"]


@pytest.fixture
def replay(capsys):
    """The document of a replay, or of its error."""

    def run(*words: str) -> tuple[int, dict]:
        status = main(["replay", *SIZED, "output=json", *words])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_the_document_and_the_series_tell_the_same(replay, tmp_path: Path) -> None:
    series, plot = tmp_path / "series.csv", tmp_path / "plot.svg"
    status, told = replay(f"trace={CONVERSATION}", f"replay.series={series}", f"replay.plot={plot}", "replay.every=5")
    assert status == 0
    assert (told["requests"], told["refused"], told["failed"]) == (200, 0, 0)
    assert told["hit_rate"] == told["cached_tokens"] / told["prompt_tokens"]
    assert 0 < told["block_hit_rate"] < told["hit_rate"] < 0.1
    assert told["peak_blocks"] <= told["total_blocks"] == 16 * 2**30 // (64 * 131072) - 1
    assert told["evictions"] > 0
    rows = list(csv.DictReader(series.open()))
    assert tuple(rows[0]) == Sample._fields
    for column, total in (("prompt_tokens", "prompt_tokens"), ("cached_tokens", "cached_tokens"), ("steps", "steps")):
        assert int(rows[-1][column]) == told[total]
    assert float(rows[-1]["seconds"]) == pytest.approx(told["simulated_seconds"], abs=1e-6)
    states = ("blocks_used", "blocks_pending", "blocks_reusable", "blocks_empty")
    assert all(sum(int(row[s]) for s in states) == told["total_blocks"] for row in rows)
    assert int(rows[-1]["blocks_used"]) == int(rows[-1]["waiting"]) == int(rows[-1]["running"]) == 0
    assert all(float(b["seconds"]) - float(a["seconds"]) > 0 for a, b in pairwise(rows))
    # One row at the first step of each 5 seconds, and the end.
    assert len(rows) in (int(told["simulated_seconds"] // 5) + 1, int(told["simulated_seconds"] // 5) + 2)
    text = plot.read_text()
    for label in ("waiting", "running", "used", "reusable", "simulated seconds", CONVERSATION.name):
        assert f"<!-- {label}" in text, label


def test_equal_replays_have_equal_files(replay, tmp_path: Path) -> None:
    words = [f"trace={AZURE}", "replay.requests=30"]
    one, two = (replay(*words, f"replay.series={tmp_path / n}.csv", f"replay.plot={tmp_path / n}.svg")[1] for n in "ab")
    for name in ("csv", "svg"):
        assert (tmp_path / f"a.{name}").read_bytes() == (tmp_path / f"b.{name}").read_bytes()
    timing = ("seconds", "events_per_second")
    assert {k: v for k, v in one.items() if k not in timing} == {k: v for k, v in two.items() if k not in timing}


def test_a_trace_without_prefixes_has_no_rates(replay) -> None:
    status, told = replay(f"trace={AZURE}", "replay.requests=30")
    assert status == 0
    assert (told["hit_rate"], told["block_hit_rate"], told["requests"]) == (None, None, 30)
    assert told["prompt_tokens"] == sum(int(row["ContextTokens"]) for row in list(csv.DictReader(AZURE.open()))[:30])
    assert told["output_tokens"] == sum(int(row["GeneratedTokens"]) for row in list(csv.DictReader(AZURE.open()))[:30])


def test_people_are_told(capsys) -> None:
    assert main(["replay", *SIZED, f"trace={CONVERSATION}", "replay.requests=20", "engine.max_model_len=8000"]) == 0
    said = capsys.readouterr().out
    longer = sum(json.loads(line)["input_length"] >= 8000 for line in CONVERSATION.read_text().splitlines()[:20])
    assert longer > 0
    assert f"20 requests; {longer} refused as too long" in said
    assert "of the prompt tokens" in said


# Every key of `replay` that `plan` has not: another value, and beside what it shows.
OTHER = {
    "trace": f"trace={AZURE}",
    "replay.step_ms": "replay.step_ms=7",
    "replay.token_us": "replay.token_us=7",
    "replay.pace": "replay.pace=one_by_one",
    "replay.requests": "replay.requests=11",
    "replay.max_tokens": "replay.max_tokens=3",
    "cache.eviction": "cache.eviction=nothing-such",
    "cache.hash": "cache.hash=xxh3",
    "cache.sanitize": "cache.sanitize=true",
    "cache.partial_reuse": "cache.partial_reuse=true",
    "cache.explain": "cache.explain=true",
    "cache.explain_history": "cache.explain_history=10",
    "replay.every": "replay.every=1",
    "replay.series": "replay.series=/nowhere/at/all.csv",
    "replay.plot": "replay.plot=/nowhere/at/all.svg",
}
ONLY_HOW = {"cache.hash", "cache.sanitize", "cache.explain_history", "replay.every"}  # the same figures, made otherwise


def test_each_key_changes_the_figures(replay) -> None:
    from kvcore.cli.commands import command
    from kvcore.config.keys import all_keys
    from kvcore.registry.loader import installed

    taken, planned = ({k.path for k in all_keys(installed(), command(n).root)} for n in ("replay", "plan"))
    assert taken - planned == set(OTHER)
    # Prompts share runs of 512 tokens: half a block of these.
    words = [f"trace={CONVERSATION}", "replay.requests=40", "cache.memory=8GiB", "replay.max_tokens=20"]
    words.append("cache.block_size=1024")
    timing = ("seconds", "events_per_second")

    def figures(*more: str) -> dict:
        return {k: v for k, v in replay(*words, *more)[1].items() if k not in timing}

    before = figures()
    same = {name for name, word in OTHER.items() if name not in ONLY_HOW and figures(word) == before}
    assert not same


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "trace"),
        (["trace=/nowhere.csv"], "trace"),
        ([f"trace={AZURE}", "replay.series=/nowhere/at/all.csv"], "replay.series"),
        ([f"trace={AZURE}", "replay.plot=plot.pdf"], "replay.plot"),
        ([f"trace={AZURE}", "replay.every=0"], "replay.every"),
        ([f"trace={AZURE}", "replay.pace=fast"], "replay.pace"),
        ([f"trace={AZURE}", "cache.eviction=nothing-such"], "cache.eviction"),
    ],
)
def test_bad_input_is_told_before_anything_is_replayed(replay, words: list[str], field: str) -> None:
    status, told = replay(*words)
    assert (status, told["error"]["field"]) == (2, field)


def test_a_picture_without_matplotlib_names_the_extra(replay, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, told = replay(f"trace={AZURE}", "replay.plot=plot.svg")
    assert (status, told["error"]["field"]) == (2, "replay.plot")
    assert "kvcore[plot]" in told["error"]["remedy"]


def test_a_replay_loads_neither_torch_nor_what_it_does_not_draw() -> None:
    words = ["replay", *SIZED, f"trace={AZURE}", "replay.requests=3"]
    code = f"import sys; from kvcore.cli import main; main({words!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "matplotlib"}.isdisjoint(done.stderr.split())
    assert "3 requests" in done.stdout
