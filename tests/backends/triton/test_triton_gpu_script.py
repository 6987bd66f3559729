"""`tests/gpu/run.py` walks through all its parts without a device, and runs nothing without `--smoke`.

What breaks costs one row, and what takes too long is ended; the document tells both.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvcore_torch.declaration import TorchBackendSpec

from kvcore.testing.cases.base import here
from kvcore.testing.cases.planning import Target

pytest.importorskip("triton")
SCRIPT = Path(__file__).resolve().parents[2] / "gpu" / "run.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_script", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def session(script, tmp_path):
    return script.Session(script.place_of(True), script.Clock(5), smoke=True, out=tmp_path / "gpu.json")


@pytest.fixture
def shapes(script, monkeypatch):
    """Three shapes for the torch backend, which is quick: the second has heads that no KV head serves."""
    from kvcore.testing.bench import rows, timing

    tiny = script._tiny()
    found = [tiny, replace(tiny, heads=3), replace(tiny, context=24)]
    monkeypatch.setattr(rows, "large_shapes", lambda what, dtype: found)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device, nbytes: 1e9)
    return found


def test_smoke(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", out, "--smoke"], capture_output=True, text=True, check=False
    )
    document = json.loads(out.read_text())
    assert done.returncode == 0, done.stderr[-2000:]
    assert document["smoke"] is True
    assert document["kit"]["summary"] == {"passed": 2}
    assert document["kit"]["proof"] == "interpreter"
    assert set(document["copy"]["blocks"]) == {"copy", "zero"}
    for what in ("write", "attention"):
        (row,) = document[what]["rows"]
        assert row["backend"] == "triton"
        assert row["ms"] > 0
        assert row["peers"]
        assert row["peers_failed"] == {}
        assert document[what]["not_run_for_time"] == document[what]["broken"] == []
    # In a process of its own; without a device FlashInfer is no candidate.
    (row,) = document["flashinfer"]["rows"]
    assert row["peers"] == row["peers_failed"] == {}
    assert "stopped" not in document["flashinfer"]
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_device_it_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path / "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no GPU here" in done.stderr


@pytest.mark.parametrize("what", ["write", "attention"])
def test_a_failing_shape_keeps_the_other_rows_and_says_why(script, session, shapes, what):
    session.target, session.smoke = Target(TorchBackendSpec, TorchBackendSpec.Config(), here()), False
    session.run(what, script.speeds(what))
    found = json.loads(session.out.read_text())[what]
    assert [r["context"] for r in found["rows"]] == [40, 24]
    (broken,) = found["broken"]
    assert broken["shape"] == str(shapes[1])
    assert "3" in broken["reason"]
    assert "Traceback" in broken["trace"]
    assert found["not_run_for_time"] == []


def test_each_row_is_on_disk_before_the_next_one_begins(script, session, shapes, monkeypatch):
    from kvcore.testing.bench import rows

    on_disk = []

    def write_rows(shape, *_):
        if session.out.exists():
            found = json.loads(session.out.read_text())["write"]
            on_disk.append((len(found["rows"]), found["not_run_for_time"]))
        if shape is shapes[2]:
            raise KeyboardInterrupt
        return [{"what": "write", "shape": str(shape)}]

    monkeypatch.setattr(rows, "write_rows", write_rows)
    session.smoke = False
    with pytest.raises(KeyboardInterrupt):
        session.run("write", script.speeds("write"))
    assert on_disk == [(1, [str(s) for s in shapes[1:]]), (2, [str(shapes[2])])]


def test_shapes_without_time_are_named(script, session, shapes):
    session.smoke, session.clock = False, script.Clock(0)
    session.run("write", script.speeds("write"))
    assert session.document["write"]["not_run_for_time"] == [str(s) for s in shapes]


def test_a_part_that_breaks_keeps_what_it_found(script, session):
    def part(session, found):
        found["before"] = 1
        raise ValueError("no such thing")

    session.run("copy", part)
    found = json.loads(session.out.read_text())["copy"]
    assert found["before"] == 1
    assert found["broken"][0]["reason"] == "ValueError: no such thing"


def test_a_process_and_what_it_started_are_ended_when_time_is_up(script, tmp_path):
    assert script.within([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    pid = tmp_path / "pid"
    begun = time.monotonic()
    assert script.within(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], 1) is None
    assert time.monotonic() - begun < 30
    compiler = int(pid.read_text())
    for _ in range(100):
        try:
            os.kill(compiler, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{compiler}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("what the process had started outlived it")


@pytest.mark.parametrize(("status", "told"), [(None, "stopped"), (-9, "broken")])
def test_flashinfer_ended_early_leaves_its_rows(script, session, monkeypatch, status, told):
    def within(command, seconds):
        out = Path(command[command.index("--out") + 1])
        out.write_text(json.dumps({"flashinfer": {"rows": [{"ms": 1}], "not_run_for_time": ["b"]}}))
        return status

    monkeypatch.setattr(script, "within", within)
    session.run("flashinfer", script.run_flashinfer)
    found = session.document["flashinfer"]
    assert (found["rows"], found["not_run_for_time"]) == ([{"ms": 1}], ["b"])
    assert ({"stopped", "broken"} & found.keys()) == {told}
