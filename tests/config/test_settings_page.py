"""docs/settings.md is true: a value is checked in one place, never renamed, and read from the same object."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.config.schema import EngineRoot
from kvcore.registry.loader import installed
from kvcore.settings import key as key_module

VALUES = {
    "cache.memory": ("3GiB", 3 * 2**30),
    "cache.dtype_by_kind.window": ("int8", "int8"),
    "engine.max_num_seqs": ("7", 7),
    "sampling.top_p": ("0.25", 0.25),
}
REPO = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| `([^`]+)` \| `([^`]+)` \| `(\w+)` \| `([^`]+)` \|$", (REPO / "docs/settings.md").read_text(), re.M
)


def read(root, path):
    for name in path.split("."):
        root = getattr(root, name)
    return root


def test_the_page_shows_the_four():
    assert [row[0] for row in ROWS] == list(VALUES)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_value_keeps_its_name_from_the_override_to_the_engine(row):
    key, field, checker, reading = row
    module, kind, name = field.rsplit(".", 2)
    owner = getattr(import_module(module), kind)
    assert (kind, name) == (checker, key.rpartition(".")[2])
    said, value = VALUES[key]
    composed = compose([f"{key}={said}", "device=cpu"], installed())
    settings = build(composed, installed(), purpose="plan").settings
    root = {"settings": settings, "params": composed.config.sampling}[reading.partition(".")[0]]
    assert read(root, reading.partition(".")[2]) == value
    # The last steps to it are the key itself.
    assert reading.split(".")[-2:] in (key.split(".")[-2:], ["params", name])
    assert isinstance(read(composed.config, key.rpartition(".")[0]), owner)


def test_the_engine_reads_the_users_own_object():
    composed = compose(["cache.memory=1GiB", "device=cpu", "engine.max_model_len=64"], installed())
    settings = build(composed, installed(), purpose="plan").settings
    assert settings.cache is composed.config.cache
    assert settings.engine == composed.config.engine


@pytest.mark.parametrize("path", VALUES)
def test_a_value_is_checked_once_on_its_way(path, monkeypatch):
    seen, check = [], key_module._check

    def watch(where, value, declared, meta, error):
        seen.append(where)
        check(where, value, declared, meta, error)

    monkeypatch.setattr(key_module, "_check", watch)
    compose([f"{path}={VALUES[path][0]}", "device=cpu"], installed())
    assert seen.count(path) == 1


def test_nobody_else_in_the_library_refuses_a_value_of_these_keys():
    """Errors of configuration and of requests that name one of them, by file; what does not fit is no such error."""
    found: dict[str, set[str]] = {}
    for file in sorted((REPO / "kvcore").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ConfigError", "RequestError"):
                named = [k.value.value for k in node.keywords if k.arg == "field" and isinstance(k.value, ast.Constant)]
                for name in named:
                    found.setdefault(name, set()).add(str(file.relative_to(REPO / "kvcore")))
    # Bytes or blocks, and a device whose size nothing tells: no check of the value.
    assert found.pop("cache.memory", set()) <= {"plan/planner.py", "engine/planning.py", "worker/worker.py"}
    assert not {path for path in VALUES if path in found}
    assert {f.name for f in EngineRoot.__dataclass_fields__.values()} >= {"cache", "engine", "sampling"}
