"""The automatic mutation run over the torch backend's write and attend: the kit and its own tests kill.

    python tests/conformance/mutants/mutation_run.py [--workers N] [--keep FOLDER]

mutmut changes one expression at a time in a copy of `backends/kvcore_torch`, in a scratch folder, so that
nobody's work tree is touched. Exit status 0: at least 90 % are killed and `survivors.toml` explains each that
lives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SURVIVORS = HERE / "survivors.toml"
LEAST = 0.9
# Write and attend; what a declaration says is judged by level 0 and by tests of its own.
MODULES = ("attention.py", "backend.py", "gather.py", "quant.py", "tile_schedule.py")
TESTS = ("conftest.py", "test_torch_attention.py", "test_torch_gather.py", "test_torch_work.py")
CONFIG = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = [{modules}]
pytest_add_cli_args_test_selection = ["tests"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
process_isolation = "fork"

[tool.pytest.ini_options]
addopts = "-q --import-mode=importlib"
pythonpath = ["tests"]
"""
KILLER = '''"""The kit's quick cases in pieces, so that mutmut runs the pieces that reach what it changed."""

import pytest
from kvcore_torch.declaration import TorchBackendSpec

from kvcore.testing import all_cases, run
from kvcore.testing.checks.cell import CHEAP

# What is cheap comes first: most changes die there.
PIECES = {}
for case in sorted(all_cases("quick"), key=lambda case: case.cost):
    if case.level != "L0":
        quantized = f"{case.stored_dtype}_{case.quant}" if case.quant else "plain"
        size = "small" if case.cost <= CHEAP else "large"
        PIECES.setdefault((size, case.level, quantized), []).append(case)


@pytest.mark.parametrize("piece", PIECES, ids="-".join)
def test_kit(piece):
    results = run(TorchBackendSpec, PIECES[piece], stop_at_first=True, probe_refused=False)
    assert [(r.case.id, r.reason) for r in results if r.outcome == "failed"] == []
'''


@dataclass(frozen=True)
class Outcome:
    """One change: its name, how it ended, and its lines as mutmut shows them."""

    name: str
    status: str
    change: str = ""


def prepare(folder: Path) -> None:
    """A project of its own: the backend as source; the kit's quick cases and the backend's tests."""
    shutil.copytree(
        ROOT / "backends" / "kvcore_torch",
        folder / "src" / "kvcore_torch",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(ROOT / "tests" / "support", folder / "tests" / "support")
    for name in TESTS:
        shutil.copy(ROOT / "tests" / "backends" / name, folder / "tests" / name)
    (folder / "tests" / "test_kill.py").write_text(KILLER)
    modules = ", ".join(f'"src/kvcore_torch/{m}"' for m in MODULES)
    (folder / "pyproject.toml").write_text(CONFIG.format(modules=modules))


def mutmut(folder: Path, *arguments: str, quiet: bool = False) -> str:
    """Run mutmut in the scratch project."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE if quiet else None,
        check=False,
    )
    if done.returncode and not quiet:
        raise SystemExit(f"mutmut {' '.join(arguments)} ended with status {done.returncode}")
    return done.stdout or ""


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Every change with its end."""
    for meta in sorted((folder / "mutants" / "src").rglob("*.meta")):
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            status = {0: "survived", None: "not run", 33: "no test"}.get(code, "killed")
            shown = "" if status == "killed" else mutmut(folder, "show", name, quiet=True)
            lines = [x for x in shown.splitlines() if x[:1] in "+-" and x[:3] not in ("+++", "---")]
            yield Outcome(name, status, "\n".join(f"{x[0]} {x[1:].strip()}" for x in lines))


def explained() -> dict[str, str]:
    """Why each known survivor may live, by its changed lines."""
    found = tomllib.loads(SURVIVORS.read_text())["survivor"] if SURVIVORS.exists() else []
    return {s["change"].strip(): s["why"] for s in found}


def report(found: list[Outcome]) -> int:
    """Print the figures; 0 when enough are killed and each survivor is explained."""
    known, lived = explained(), [o for o in found if o.status != "killed"]
    rate = 1 - len(lived) / max(1, len(found))
    for o in lived:
        why = known.get(o.change)
        print(f"\n{o.status}: {o.name}\n{o.change}\n  {'NOT EXPLAINED' if why is None else why}")
    print(f"\n{len(found)} changes, {len(found) - len(lived)} killed: {rate:.1%} (at least {LEAST:.0%})")
    return int(not found or rate < LEAST or any(o.change not in known for o in lived))


def main() -> int:
    """Run it in a scratch folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="scratch folder that is kept; a second run goes on there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        if not (folder / "pyproject.toml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            prepare(folder)
        mutmut(folder, "run", "--max-children", str(options.workers))
        return report(list(outcomes(folder)))


if __name__ == "__main__":
    sys.exit(main())
