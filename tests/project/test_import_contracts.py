"""The import contracts hold, and each of them fails when somebody breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = ("kvcore", "backends", "plugins")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """`lint-imports` on the tree below `root` and on no other copy of the packages."""
    paths = [str(root), str(root / "backends"), str(root / "plugins")]
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


def broken(output: str) -> list[str]:
    """Names of the contracts that lint-imports calls broken."""
    return [line.split(" BROKEN")[0] for line in output.splitlines() if " BROKEN" in line]


@pytest.fixture
def copy(repo: Path, tmp_path: Path) -> Path:
    """A copy of the sources that may be spoiled."""
    for name in SOURCES:
        shutil.copytree(repo / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_tree_keeps_its_contracts(repo: Path) -> None:
    result = lint(repo)
    assert result.returncode == 0, result.stdout + result.stderr


# (file, planted line, contract that must break)
PLANTS = {
    "a lower room imports a higher one": ("kvcore/plan/groups.py", "import kvcore.manage", "Imports only go downwards"),
    "two rooms import each other": (
        "kvcore/attention/query.py",
        "import kvcore.memory.views",
        "Imports only go downwards",
    ),
    "the logical half imports torch": ("kvcore/manage/__init__.py", "import torch", "The logical half holds no tensor"),
    "the logical half imports memory": (
        "kvcore/plan/config.py",
        "from kvcore import memory",
        "The logical half holds no tensor",
    ),
    "a declaration imports torch": (
        "backends/kvcore_triton/declaration.py",
        "import torch",
        "Planning, listing and help import no torch",
    ),
    "the query imports torch through another module": (
        "kvcore/attention/query.py",
        "import kvcore.attention.batch",
        "Planning, listing and help import no torch",
    ),
    "the worker imports the kit": (
        "kvcore/worker/messages.py",
        "import kvcore.testing.oracle.tolerance",
        "Imports only go downwards",
    ),
    "the kit imports the worker": (
        "kvcore/testing/cases/case.py",
        "import kvcore.worker.messages",
        "The conformance kit needs no engine",
    ),
    "expected values are made by a check": (
        "kvcore/testing/oracle/attention.py",
        "import kvcore.testing.checks.scene",
        "Rooms of the conformance kit import only downwards",
    ),
    "kvcore imports a backend": (
        "kvcore/registry/__init__.py",
        "import kvcore_torch",
        "kvcore imports neither backends nor plugins",
    ),
    "a backend imports another": (
        "backends/kvcore_triton/__init__.py",
        "import kvcore_torch",
        "Backends and plugins never import each other",
    ),
    "a plugin imports a backend": (
        "plugins/kvcore_metrics/__init__.py",
        "import kvcore_torch",
        "Backends and plugins never import each other",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_violation_is_found(copy: Path, plant: str) -> None:
    file, line, contract = PLANTS[plant]
    source = copy / file
    source.write_text(f"{source.read_text()}\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert contract in broken(result.stdout)
