"""`kvcore.backend` is all that a plugin needs, and all that ours, the examples and the docs use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcore.backend as contract

OPEN = ("kvcore.backend", "kvcore.cache", "kvcore.testing")
PLACES = ("backends", "plugins", "docs/examples")


def imported(source: str) -> Iterator[str]:
    """Modules of kvcore that some code imports, at whatever depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvcore":
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] == "kvcore")


def inner(source: str, *more: str) -> list[str]:
    return [name for name in imported(source) if not name.startswith(OPEN) and name not in more]


@pytest.mark.parametrize("place", PLACES)
def test_plugins_import_the_contract_alone(repo: Path, place: str) -> None:
    files = sorted((repo / place).rglob("*.py"))
    assert files
    found = {str(f.relative_to(repo)): names for f in files if (names := inner(f.read_text()))}
    assert found == {}
    assert inner("from kvcore.attention.batch import Batch\n") == ["kvcore.attention.batch"]


PAGES = ("index", "write-a-backend", "hooks", "in-transformers", "build-an-engine")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in PAGES)])
def test_the_docs_show_no_inner_module(repo: Path, page: str) -> None:
    blocks = re.findall(r"^```(?:\{code-block\} )?python\n(?::.*\n)*(.*?)^```", (repo / page).read_text(), re.M | re.S)
    assert [name for block in blocks if not block.startswith(" ") for name in inner(block, "kvcore")] == []


def test_every_name_is_there_and_says_what_it_is() -> None:
    assert sorted(contract.__all__) == sorted(contract.MODULE_OF)
    for name in contract.__all__:
        found = getattr(contract, name)
        assert name == "API_VERSION" or name == "TOKEN" or found.__doc__, name
    with pytest.raises(AttributeError, match="it has API_VERSION, "):
        _ = contract.no_such_name  # type: ignore[attr-defined]


def test_what_editors_see_is_what_is_there(repo: Path) -> None:
    """The names under `TYPE_CHECKING` come from the same modules as those that are loaded."""
    tree = ast.parse((repo / "kvcore" / "backend.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If)]
    seen = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == contract.MODULE_OF


def test_a_declaration_loads_no_torch() -> None:
    code = (
        "import sys; from kvcore.backend import BackendSpec, Capabilities, FamilyAdapter, KVHeads, Window, nhd;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
