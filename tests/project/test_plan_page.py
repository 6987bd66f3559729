"""The page for operators: its commands print what it shows, and its table accounts for every byte."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cache_facts import fact_files
from support.tutorial import Command, matches, parse

from kvcore.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "plan-a-model.md"
TEXT = re.sub(r"```\{include\}.*\n```\n", "", PAGE.read_text())
COMMANDS = [step for step in parse(TEXT) if isinstance(step, Command)]


@pytest.mark.parametrize("command", COMMANDS, ids=[c.words[-1] for c in COMMANDS])
def test_its_commands_print_what_it_shows(
    command: Command, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repo)
    status = main([*command.words[1:]])
    printed = capsys.readouterr().out
    assert matches(command.expected, printed), printed
    assert status == int("it fits with" in command.expected)


def test_every_difference_of_the_table_has_a_reason(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repo / "docs" / "_ext"))
    table = __import__("byte_table")
    try:
        rows = table.rows()
    finally:
        del sys.modules["byte_table"]
    assert [row[0] for row in rows] == [facts["name"] for facts in fact_files()]
    assert not [name for name, hand, stored, _, why in rows if hand != stored and not why]
    # By hand: 20 of 35 layers own a cache of 2 heads of 256; 61 latents of 576, and 61 keys of 132 bytes.
    found = {name: (hand, stored) for name, hand, stored, _, _ in rows}
    assert found["gemma-3n-e4b"] == (35 * 2 * 2 * 256 * 2, 20 * 2 * 2 * 256 * 2)
    assert found["deepseek-v3.2"] == (61 * 576 * 2, 61 * (576 * 2 + 132))
