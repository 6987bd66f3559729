"""The first page of the docs: its picture names what the code has, and its examples run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.tutorial import BLOCK, Command, matches, parse

from kvcore.cli import main


@pytest.fixture
def page(repo: Path) -> str:
    return (repo / "docs" / "index.md").read_text()


def test_the_picture_names_things_of_the_code(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repo / "docs" / "_ext"))
    overview = __import__("overview")
    try:
        drawn = ElementTree.fromstring(overview.picture())
        titles = {t.text for t in drawn.iter("text") if t.get("class") == "title"}
        assert {"KVCacheSpec", "plan()", "KVCacheManager", "AttentionBackend"} <= titles
        with pytest.raises(AttributeError):
            _ = overview.Box("kvcore.plan.planner:no_such_thing", ("", "")).title
    finally:
        del sys.modules["overview"]


def test_its_commands_print_what_it_shows(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    consoles = "\n".join(m.group(0) for m in BLOCK.finditer(page) if m.group(2) == "console" and not m.group(1))
    commands = [step for step in parse(f"\n{consoles}\n") if isinstance(step, Command)]
    assert [c.words[:2] for c in commands] == [("kvcore", "conform"), ("kvcore", "plan")]
    for command in commands:
        assert main([*command.words[1:]]) == 0
        assert matches(command.expected, capsys.readouterr().out), command.line


def test_its_python_answers(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [m.group(4) for m in BLOCK.finditer(page) if m.group(2) == "python"]
    exec(compile(code, "docs/index.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("The capital of France is Paris. 0\n")
    assert "one token adds 46080 bytes" in printed


def test_the_table_of_backends_is_of_this_kit(repo: Path) -> None:
    """Torch serves the whole table, so a refusal in its column is a case that says something else than its row."""
    spec = importlib.util.spec_from_file_location("docs_support", repo / "docs" / "_ext" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    column = page.column("torch")
    assert set(column.values()) == {"device"}
    assert list(column) == list(page.FEATURES)
