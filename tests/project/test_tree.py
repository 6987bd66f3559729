"""The tree itself: small files, no assert in shipped code, no trace of a machine, a README that leads in."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

SHIPPED = ("kvcore", "backends", "plugins")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".json", ".jsonl", ".cpp", ".cu", ".h", ""}


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Files that git tracks, and those it would."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout.decode()
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def sources(repo: Path) -> list[Path]:
    """Python files that ship."""
    return [p for name in SHIPPED for p in sorted((repo / name).rglob("*.py"))]


def test_no_file_is_longer_than_400_lines(tracked: list[Path]) -> None:
    long = {p.name: n for p in tracked if p.suffix == ".py" and (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_shipped_code_has_no_assert(repo: Path) -> None:
    """`python -O` drops asserts; where there is none, it cannot change a result."""
    found = [
        f"{path.relative_to(repo)}:{node.lineno}"
        for path in sources(repo)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "__debug__")
    ]
    assert not found


def test_nothing_is_left_for_later_without_a_name(repo: Path) -> None:
    """What is not built yet raises `NotBuiltError` with its name."""
    words = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
    found = [str(p.relative_to(repo)) for p in sources(repo) if words.search(p.read_text())]
    assert not found


def test_every_module_says_what_it_is_for(repo: Path) -> None:
    silent = [p for p in sources(repo) if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def test_no_path_of_a_machine_and_no_registry_host(tracked: list[Path], repo: Path) -> None:
    hosts = ["pypi" + ".org", "python" + "hosted.org", "npmjs" + ".com", "download" + ".pytorch.org"]
    machine = re.compile("(?<![\\w.<~$])/(?:work|root|home)/[a-z]|" + "|".join(map(re.escape, hosts)))
    found = {}
    for path in tracked:
        if path.suffix in TEXT:
            hit = machine.search(path.read_text(errors="replace"))
            if hit:
                found[str(path.relative_to(repo))] = hit.group()
    assert not found


def test_readme_names_both_commands_at_the_top(repo: Path) -> None:
    top = "\n".join((repo / "README.md").read_text().splitlines()[:40])
    assert "make run" in top
    assert "make test" in top


def test_ci_runs_make_test(repo: Path) -> None:
    script = repo / ".ci" / "run"
    assert os.stat(script).st_mode & stat.S_IXUSR
    assert "make test" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_torch_is_never_installed_without_the_constraints(repo: Path) -> None:
    """Every pip call of the Makefile goes through one variable, and that one names the constraints."""
    text = (repo / "Makefile").read_text()
    calls = [line for line in text.splitlines() if re.search(r"\bpip\b", line)]
    assert [line for line in calls if line.startswith("PIP :=") and "-c constraints.txt" in line] == calls
    assert re.search(r"^torch==\d", (repo / "constraints.txt").read_text(), re.MULTILINE)
