"""The three ways in: the command, the pytest plugin and the base class."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.cli import main


def suite(folder, *words):
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfs", *words]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, done.stdout


def test_the_command(tmp_path, capsys):
    target = tmp_path / "matrix.html"
    # Triton declares that it has no float64, so that its part of the run is quick.
    words = ["backend=torch,triton", "where.dtype=float64", "where.phase=mixed", f"html={target}", "output=json"]
    assert main(["conform", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [b["name"] for b in document["backends"]] == ["torch", "triton"]
    assert document["backends"][0]["summary"]["passed"] > 0
    assert {c["backend"] for c in document["matrix"]} == {"torch", "triton"}
    assert target.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "kind", "field"),
    [
        (["backend=torch", "where.window=1234"], "ConfigError", "where"),
        (["backend=nobody"], "UnknownBackendError", "backend"),
        (["backend=torch", "level=medium"], "ConfigError", "level"),
        (["backend=torch", "where.colour=red"], "UnknownKeyError", "where.colour"),
        (["backend=torch", "backend=triton"], "ConfigError", "backend"),
        (["backend=torch", "device=h100-80gb"], "ConfigError", "device"),
    ],
)
def test_bad_input_is_status_2(words, kind, field, capsys):
    status = main(["conform", *words, "output=json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (status, error["type"], error["field"]) == (2, kind, field)


def test_the_suite_finds_a_backend_by_its_entry_point(tmp_path):
    words = ("--pyargs", "kvcore.testing.suite", "--kvcore-backend", "torch", "-k", "sinks and prefill or L0")
    status, out = suite(tmp_path, *words)
    assert status == 0
    assert " passed" in out


def test_the_base_class(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "from kvcore.testing import BackendConformance\n"
        "from kvcore_torch.declaration import TorchBackendSpec\n"
        "class Wrong(TorchBackendSpec):\n"
        "    name = 'wrong'\n"
        "    @classmethod\n"
        "    def create(cls, device, options):\n"
        "        made = super().create(device, options)\n"
        "        right = made.attend\n"
        "        def attend(layer, query, cache, metadata, out, lse=None):\n"
        "            right(layer, query, cache, metadata, out, lse)\n"
        "            out.neg_()\n"
        "        made.attend = attend\n"
        "        return made\n"
        "class TestRight(BackendConformance):\n"
        "    spec = TorchBackendSpec\n"
        "    where = {'phase': 'decode', 'sinks': 'true', 'heads': '1-16'}\n"
        "class TestWrong(BackendConformance):\n"
        "    spec = Wrong\n"
        "    where = {'phase': 'decode', 'sinks': 'true', 'heads': '1-16'}\n"
    )
    status, out = suite(tmp_path, str(Path("test_mine.py")))
    assert status == 1
    assert "FAILED test_mine.py::TestWrong" in out
    assert "TestRight" not in out
    assert "from kvcore.testing import Case, Seq, run" in out
    assert "from test_mine import Wrong" in out


REFUSES_LATE = """
from kvcore.errors import Refusal
from kvcore.testing import BackendConformance
from kvcore_torch.declaration import TorchBackendSpec
class Late(TorchBackendSpec):
    name = 'late'
    made = False
    @classmethod
    def unsupported(cls, query, options):
        return Refusal('queries', query.dtype, 'none any more') if cls.made else None
    @classmethod
    def create(cls, device, options):
        cls.made = True
        return super().create(device, options)
class TestLate(BackendConformance):
    spec = Late
"""


def test_a_class_whose_backend_refuses_all_in_the_end_fails(tmp_path):
    (tmp_path / "test_late.py").write_text(REFUSES_LATE)
    status, out = suite(tmp_path, "test_late.py::TestLate", "-k", "base or profile_served")
    assert status == 1
    assert "FAILED test_late.py::TestLate::test_conformance[L0.profile_served]" in out
    assert "no core profile is served; kv: L2.attend.base" in out
    assert "queries=float32 (allowed: none any more)" in out
