"""A stranger's plugin from end to end, as the tutorial tells it: install, look, prove, run, take away.

One test plays the tutorial in a scratch environment, since each of its steps needs those before it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tutorial import Command, Piece, Scratch, files, matches, parse

EXAMPLE = "kvcore-example/"
# What the page has to show, whoever rewrites it.
SHOWN = (
    "pip install",
    "--help",
    "kvcore conform backend=example",
    "kvcore conform backend=all",
    "kvcore.testing.suite --kvcore-backend example",
    "kvcore run backend=example",
    "backends.example.x=8",
    "cache.content=",
    "cache.retention=",
    "kvcore diff",
    "pip uninstall",
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The default model, fetched and converted once a machine; the tutorial's `run` then finds it."""
    from kvcore.models.home import ensure_model

    return ensure_model()


@pytest.fixture(scope="module")
def page(repo: Path) -> str:
    return (repo / "docs" / "write-a-backend.md").read_text()


def test_the_tutorial_shows_the_example_byte_for_byte(repo: Path, page: str) -> None:
    folder = repo / "docs" / "examples" / "kvcore-example"
    shown = {k.removeprefix(EXAMPLE): v for k, v in files(parse(page)).items() if k.startswith(EXAMPLE)}
    kept = {
        p.relative_to(folder).as_posix(): p.read_text()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert shown == kept


def play(repo: Path, folder: Path, page: str) -> list[str]:
    """Play a page in a scratch environment; the lines that were typed."""
    scratch, steps = Scratch(repo, folder), parse(page)
    for name, text in files(steps).items():
        path = scratch.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    played = []
    for step in steps:
        if isinstance(step, Piece):
            continue
        done = scratch.run(*step.words)
        printed = done.stderr if step.fails else done.stdout
        assert done.returncode == (2 if step.fails else 0), f"{step.line}\n{done.stdout}{done.stderr}"
        assert matches(step.expected, printed), f"{step.line}\nexpected\n{step.expected}\nprinted\n{printed}"
        assert "Traceback" not in done.stderr
        played.append(step.line)
    return played


def test_the_tutorial_runs(repo: Path, page: str, tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> None:
    played = play(repo, tmp_path_factory.mktemp("tutorial"), page)
    for wanted in SHOWN:
        assert any(wanted in line for line in played), wanted
    last = [s for s in parse(page) if isinstance(s, Command)][-1]
    assert last.fails, "after it is gone, its name is an error"


def test_the_smallest_backend_runs(repo: Path, tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> None:
    page = (repo / "docs" / "smallest-backend.md").read_text()
    code = [text for name, text in files(parse(page)).items() if name.endswith(".py")]
    assert sum(len([line for line in text.splitlines() if line.strip()]) for text in code) <= 60
    played = play(repo, tmp_path_factory.mktemp("smallest"), page)
    assert any("kvcore conform backend=tiny" in line for line in played)


@pytest.mark.parametrize(
    ("expected", "printed", "fits"),
    [
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\nd\n", "a\nb\nd\n", False),
        ("...\nd\n", "a\nb\n", False),
        ("a ... c\n", "a b c\n", True),
        ("a ... c\n", "a b\nc\n", False),
        ("a\n...\n", "a\n", True),
    ],
)
def test_what_is_printed_is_compared(expected: str, printed: str, fits: bool) -> None:
    assert matches(expected, printed) is fits


def test_a_block_that_would_never_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="never executed"):
        parse("text\n```python\nprint(1)\n```\n")
