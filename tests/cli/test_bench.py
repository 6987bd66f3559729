"""`kvcore bench`: rows with medians, shares of the bandwidth limit, and ratios to peers."""

import json

import pytest
import torch

from kvcore.cli import bench, main
from kvcore.testing.bench import peers, rows, timing
from kvcore.testing.bench.problem import Shape

BASE = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float32"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shapes = [
        Shape(2, 40, **BASE),
        Shape(1, 24, 24, **BASE),
        Shape(2, 40, **BASE, cache_dtype="int8", quant="token_head"),
    ]
    monkeypatch.setattr(rows, "small_shapes", lambda what, dtype: shapes)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device, nbytes: 1e9)
    monkeypatch.setitem(bench.ROUNDS, "cpu", 1)


@pytest.mark.parametrize("what", ["attention", "write"])
def test_rows(what, capsys):
    assert main(["bench", f"what={what}", "device=cpu", "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["what"], document["proof"], document["copy_gb_per_s"]) == (what, "device", 1.0)
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


@pytest.mark.parametrize("what", ["attention", "write"])
def test_backends_in_one_table_each_beside_the_others(what, monkeypatch, capsys):
    monkeypatch.setattr(rows, "small_shapes", lambda what, dtype: [Shape(1, 20, **BASE)])
    argv = ["bench", f"what={what}", "device=cpu", "backend=torch,triton"]
    assert main([*argv, "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["proof"] == "device, interpreter"
    mine, theirs = document["rows"]
    assert (mine["backend"], theirs["backend"]) == ("torch", "triton")
    other = "sdpa, contiguous" if what == "attention" else "index_put"
    assert set(mine["peers"]) == {"backend triton", other}
    assert set(theirs["peers"]) == {"backend torch", other}
    # Timed once, in the same rounds: both rows tell of the same three figures.
    assert mine["peers"]["backend triton"]["ms"] == theirs["ms"]
    assert theirs["peers"]["backend torch"]["ms"] == mine["ms"]
    assert mine["peers"][other]["ms"] == theirs["peers"][other]["ms"]
    assert theirs["peers"]["backend torch"]["ratio"] == pytest.approx(mine["ms"] / theirs["ms"])
    assert main(argv) == 0
    assert {line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]} == {"torch", "triton"}


def test_a_backend_is_measured_on_what_it_serves_and_named_once(monkeypatch, capsys):
    monkeypatch.setattr(rows, "small_shapes", lambda what, dtype: [Shape(1, 20, **BASE | {"dtype": "float64"})])
    assert main(["bench", "what=write", "device=cpu", "backend=triton,torch", "output=json"]) == 0
    assert [r["backend"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["torch"]
    for argv in (["backend=torch", "backend=triton"], ["backend=torch,"]):
        assert main(["bench", "what=write", "device=cpu", *argv]) == 2
        assert "name the backends once" in capsys.readouterr().err


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


def test_a_peer_that_raises_is_told_with_its_reason(capsys, monkeypatch):
    def sdpa(problem):
        if problem.shape.query > 1:
            raise AssertionError("built for another device\nand more")
        return lambda: None

    monkeypatch.setattr(peers, "_sdpa", sdpa)
    assert main(["bench", "what=attention", "device=cpu", "output=json"]) == 0
    decode, prefill, _ = json.loads(capsys.readouterr().out)["rows"]
    assert (decode["peers"].keys(), decode["peers_failed"]) == ({"sdpa, contiguous"}, {})
    why = {"sdpa, contiguous": "AssertionError: built for another device\nand more"}
    assert (prefill["peers"], prefill["peers_failed"]) == ({}, why)
    assert prefill["ms"] > 0
    assert rows.table([decode, prefill, prefill]).endswith(
        "\nsdpa, contiguous failed: AssertionError: built for another device (2 rows)"
    )


def test_a_peer_that_raises_when_called_is_no_peer(monkeypatch):
    def call():
        raise RuntimeError("no kernel image")

    class Asked:
        shape, device = Shape(1, 16, **BASE), "cpu"

    monkeypatch.setattr(peers, "_sdpa", lambda problem: call)
    assert peers.peers(Asked()) == ({}, {"sdpa, contiguous": "RuntimeError: no kernel image"})
    assert peers.peers(Asked(), ["flashinfer"]) == ({}, {})


def test_candidates_by_shape(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    half = BASE | {"dtype": "bfloat16"}
    quantized = {"cache_dtype": "int8", "quant": "token_head"}
    sdpa = "sdpa, contiguous"
    assert peers.candidates(Shape(1, 16, **half), "cuda") == (sdpa, "flash_attn", "flashinfer")
    assert peers.candidates(Shape(1, 16, 16, **half), "cuda") == (sdpa, "flash_attn")
    for shape, device in (
        (Shape(1, 16, **half), "cpu"),
        (Shape(1, 16, **BASE), "cuda"),
        (Shape(1, 16, **half, **quantized), "cuda"),
    ):
        assert peers.candidates(shape, device) == (sdpa,)


def test_every_format_has_decode_prefill_and_chunks(monkeypatch):
    monkeypatch.undo()
    found = {(s.stored, s.quant, s.phase) for s in rows.large_shapes("attention", "bfloat16")}
    formats = {("bfloat16", None), ("fp8_e4m3", "tensor"), ("int8", "token_head")}
    assert found == {(*f, phase) for f in formats for phase in ("decode", "prefill", "chunked")}


def test_on_a_device_a_call_starts_behind_zeroing_that_empties_the_cache(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append(("event", timer._buffer.any().item()))

        def synchronize(self):
            log.append("waited")

        def elapsed_time(self, other):
            return 2.0

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    timer = timing.DeviceTimer("cpu", 64)
    for _ in range(2):
        timer._buffer.fill_(1)
        assert timer(lambda: log.append("called")) == 0.002
    assert log == [("event", False), "called", ("event", False), "waited"] * 2
    assert timing.FLUSH_BYTES == 256 << 20
    assert timer._buffer.dtype == torch.uint8
