"""The wheel works by itself: built, installed in a scratch environment, asked for a plan there.

The scratch environment holds nothing but the wheel. The libraries (torch among them) are not installed
again: a `.pth` file adds the site-packages of the environment that runs the tests, behind its own.
A plain path line reads no further `.pth` files, so the editable checkout is not found through it; the
tests make sure that code, configuration and entry points come from the wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest

BACKENDS = ("kvcore_torch", "kvcore_triton", "kvcore_flash_attn", "kvcore_flashinfer", "kvcore_vllm_cpu")


@dataclass(frozen=True)
class Scratch:
    """A scratch environment with the wheel in it."""

    wheel: Path
    root: Path

    @property
    def site(self) -> Path:
        """Its own site-packages."""
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.root)}))

    def run(self, *command: str, optimize: bool = False) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in an empty directory and with a clean environment."""
        empty = self.root.parent / "empty"
        empty.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVCORE"))}
        kept["KVCORE_HOME"] = str(self.root.parent / "home")
        if optimize:
            kept["PYTHONOPTIMIZE"] = "1"
        program = str(self.root / "bin" / command[0])
        result = subprocess.run(
            [program, *command[1:]], cwd=empty, env=kept, capture_output=True, text=True, check=False
        )
        assert not list(empty.iterdir()), "a command left files behind"
        return result


@pytest.fixture(scope="session")
def scratch(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Build the wheel, make the environment, install."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(repo)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("kvcore-*.whl")
    scratch = Scratch(wheel, folder / "env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(scratch.root)], check=True)
    python = str(scratch.root / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (scratch.site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scratch


def test_wheel_holds_code_plugins_configuration_and_licence(scratch: Scratch) -> None:
    names = zipfile.ZipFile(scratch.wheel).namelist()
    for wanted in (
        "kvcore/cli/__init__.py",
        "kvcore/conf/samples.yaml",
        "kvcore_metrics/plugin.py",
        "kvcore_transformers/cache.py",
    ):
        assert wanted in names
    for backend in BACKENDS:
        assert f"{backend}/plugin.py" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not [n for n in names if n.startswith(("tests/", "docs/", "backends/", "plugins/", "conf/"))]


def test_wheel_declares_its_requirements(scratch: Scratch) -> None:
    archive = zipfile.ZipFile(scratch.wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = message_from_string(archive.read(name).decode())
    plain = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    for library in ("torch>=2.11", "transformers~=5.24", "pluggy", "hydra-core"):
        assert any(r.startswith(library) for r in plain), library
    assert not [r for r in plain if r.startswith(("triton", "flash-attn", "flashinfer", "vllm"))]
    assert {"triton", "flashinfer", "flash-attn", "all", "dev"} <= set(metadata.get_all("Provides-Extra", []))


def test_code_configuration_and_entry_points_come_from_the_wheel(scratch: Scratch, repo: Path) -> None:
    code = """
import json, sys
from importlib import import_module
from importlib.metadata import distribution, entry_points
from kvcore.config.home import conf_dir
print(json.dumps({
    "files": [import_module(n).__file__ for n in sys.argv[1:]],
    "conf": str(conf_dir()),
    "path": sys.path,
    "distribution": str(distribution("kvcore").locate_file("")),
    "entry_points": {e.name: e.value for e in entry_points(group="kvcore") if e.dist.name == "kvcore"},
    "vllm": [e.value for e in entry_points(group="vllm.general_plugins") if e.dist.name == "kvcore"],
    "editable": str(distribution("kvcore").read_text("direct_url.json")),
}))
"""
    result = scratch.run("python", "-c", code, "kvcore", "kvcore_metrics", "kvcore_vllm", *BACKENDS)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    site = str(scratch.site)
    assert all(f.startswith(site) for f in found["files"])
    assert found["conf"] == str(scratch.site / "kvcore" / "conf")
    assert found["distribution"].rstrip("/") == site
    assert "editable" not in found["editable"]
    assert not [p for p in found["path"] if p and Path(p) in (repo, repo / "backends", repo / "plugins")]
    assert {"torch", "triton", "flash_attn", "flashinfer", "vllm_cpu", "metrics"} <= set(found["entry_points"])
    assert found["vllm"] == ["kvcore_vllm.plugin:register"]


PLAN = ("kvcore", "plan", "output=json", "cache.memory=512MiB", "device=cpu")


def test_plan_runs_from_the_wheel(scratch: Scratch) -> None:
    result = scratch.run(*PLAN)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    # SmolLM2-135M: 30 layers, 3 KV heads of 64; float32 on a CPU.
    assert plan["bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert plan["num_blocks"] == (512 << 20) // plan["bytes_per_block"]
    assert plan["tensors"][0]["shared_by"] == ["L0"]


def test_optimized_python_gives_the_same_plan(scratch: Scratch) -> None:
    plain, optimized = scratch.run(*PLAN), scratch.run(*PLAN, optimize=True)
    assert (plain.returncode, optimized.returncode) == (0, 0)
    assert plain.stdout == optimized.stdout


def test_optimized_python_refuses_the_same(scratch: Scratch) -> None:
    bad = ("kvcore", "plan", "output=json", "cache.block_size=-1")
    plain, optimized = scratch.run(*bad), scratch.run(*bad, optimize=True)
    assert (plain.returncode, optimized.returncode) == (2, 2)
    assert plain.stdout == optimized.stdout
    assert json.loads(plain.stdout)["error"]["field"] == "cache.block_size"
