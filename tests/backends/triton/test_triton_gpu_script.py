"""`tests/gpu/run.py` walks through all its parts without a device, and runs nothing without `--smoke`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).resolve().parents[2] / "gpu" / "run.py"


def test_smoke(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", out, "--smoke"], capture_output=True, text=True, check=False
    )
    document = json.loads(out.read_text())
    assert done.returncode == 0, done.stderr[-2000:]
    assert document["smoke"] is True
    assert document["kit"]["summary"] == {"passed": 2}
    assert document["kit"]["rung"] == "interpreter"
    assert set(document["copy"]["blocks"]) == {"copy", "zero"}
    for what in ("write", "attention"):
        (row,) = document[what]["rows"]
        assert row["backend"] == "triton"
        assert row["ms"] > 0
        assert row["peers"]
        assert document[what]["not_run_for_time"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_device_it_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path / "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
