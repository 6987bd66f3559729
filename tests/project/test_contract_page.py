"""The page of the contract names every member, and only mutants and cases that exist."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import kvcore.backend as contract
from kvcore.testing import all_cases

SECTIONS = {
    "`AttentionBackend`": ("AttentionBackend",),
    "`BackendSpec`": ("BackendSpec",),
    "`AttentionLayer` and `AttentionGroup`": ("AttentionLayer", "AttentionGroup"),
    "`Batch` and `GroupBatch`": ("Batch", "GroupBatch"),
    "`AttentionQuery` and `Capabilities`": ("AttentionQuery", "Capabilities"),
}
LAST = "The other names"


@pytest.fixture(scope="module")
def page(repo: Path) -> dict[str, list[list[str]]]:
    """The rows of each section's table, as cells."""
    found = {}
    for section in re.split(r"^## ", (repo / "docs" / "contract.md").read_text(), flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
        found[title] = rows
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def members(owner: str) -> set[str]:
    """Public fields, attributes and methods of a class of the contract."""
    kind = getattr(contract, owner)
    found = {n for n in {**vars(kind), **kind.__annotations__} if not n.startswith("_")}
    return found | ({f.name for f in fields(kind)} if is_dataclass(kind) else set())


@pytest.mark.parametrize("section", SECTIONS)
def test_every_member_has_a_row(page: dict[str, list[list[str]]], section: str) -> None:
    told = {
        name for row in page[section] for cell in row[: 2 if "Capabilities" in section else 1] for name in names(cell)
    }
    there = set().union(*(members(owner) for owner in SECTIONS[section]))
    assert there - told == set()
    listed = {name for row in page[section] for name in names(row[0])}
    assert listed - there == set(), "gone from the code"


def test_every_other_name_of_the_contract_is_listed(page: dict[str, list[list[str]]]) -> None:
    owners = {owner for group in SECTIONS.values() for owner in group}
    told = [name for row in page[LAST] for name in names(row[0])]
    assert sorted([*told, *owners]) == sorted(contract.__all__)


def test_every_feature_is_listed(page: dict[str, list[list[str]]]) -> None:
    told = {name for row in page["`AttentionQuery` and `Capabilities`"] for name in names(row[1])}
    assert {f.value for f in contract.Feature} - told == set()


def test_cases_and_mutants_exist(repo: Path, page: dict[str, list[list[str]]]) -> None:
    matrix = json.loads((repo / "tests" / "conformance" / "mutants" / "kill_matrix.json").read_text())
    cases = {case.id for case in all_cases("full")}
    for section in SECTIONS:
        for row in page[section]:
            (case,) = names(row[3])
            assert case in cases, row
            assert row[2] == "-" or (names(row[2])[0] in matrix), row


def test_the_named_case_kills_the_mutant_or_its_level_does(repo: Path, page: dict[str, list[list[str]]]) -> None:
    matrix = json.loads((repo / "tests" / "conformance" / "mutants" / "kill_matrix.json").read_text())
    for section in SECTIONS:
        for row in page[section]:
            if row[2] != "-":
                (case,), (mutant,) = names(row[3]), names(row[2])
                assert case.split(".")[0] in matrix[mutant]["levels"], row
