"""`kvcore bench`: rows with medians, shares of the bandwidth limit, and ratios to peers."""

import json

import pytest

from kvcore.cli import bench, main
from kvcore.testing.bench import rows, timing
from kvcore.testing.bench.problem import Shape

BASE = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float32"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shapes = [Shape(2, 40, **BASE), Shape(1, 24, 24, **BASE),
              Shape(2, 40, **BASE, cache_dtype="int8", quant="token_head")]  # fmt: skip
    monkeypatch.setattr(rows, "small_shapes", lambda what, dtype: shapes)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device, nbytes: 1e9)
    monkeypatch.setitem(bench.ROUNDS, "cpu", 1)


@pytest.mark.parametrize("what", ["attention", "write"])
def test_rows(what, capsys):
    assert main(["bench", f"what={what}", "device=cpu", "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["what"], document["rung"], document["copy_gb_per_s"]) == (what, "device", 1.0)
    assert [r["phase"] for r in document["rows"]] == ["decode", "prefill", "decode"]
    for row in document["rows"]:
        assert row["backend"] == "torch"
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
        assert row["of_bandwidth"] == pytest.approx(row["gb_per_s"] / 1.0)
        for peer in row["peers"].values():
            assert peer["ratio"] == pytest.approx(peer["ms"] / row["ms"])
    first, _, quantized = document["rows"]
    assert first["peers"].keys() == ({"sdpa, contiguous"} if what == "attention" else {"index_put"})
    # 2 sequences of 40 tokens, or 2 tokens: keys and values of 2 heads of 32; int8 has 4-byte scales.
    plain, int8 = 2 * 2 * 32 * 4, 2 * 2 * (32 + 4)
    want = (80 * plain, 80 * int8) if what == "attention" else (2 * 2 * plain, 2 * (plain + int8))
    assert (first["bytes"], quantized["bytes"]) == want


def test_for_people_and_only_what_runs_here(capsys):
    assert main(["bench", "what=write", "device=cpu"]) == 0
    assert "of limit" in capsys.readouterr().out
    assert main(["bench", "what=write", "device=h100-80gb"]) == 2
    assert "needs a device that is here" in capsys.readouterr().err


def test_interleaving_times_every_method_once_a_round(monkeypatch):
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    found = timing.interleaved(calls, 3, "cpu", warm=1)
    assert order == ["a", "b"] * 4
    assert set(found) == {"a", "b"}
