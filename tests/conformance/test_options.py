"""Options: those that a declaration names are asked at every level, every other choice at level full."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import pytest
from conformance.mutants.mutant import load

from kvcore.registry.loader import installed
from kvcore.testing import run
from kvcore.testing.cases.base import here, open_backend
from kvcore.testing.cases.option_sets import choices
from kvcore.testing.checks.runner import selected

TorchSpec = installed().backend("torch")
COMPILED = "stop = min(first + self.partition, max(held, 1))"


@pytest.fixture(scope="module")
def compiled_for_256(tmp_path_factory):
    """The partitioned backend, with kernels for partitions of 256 keys whatever the option says."""
    folder = tmp_path_factory.mktemp("options")
    load("partitioned_as_it_is", {}, folder, "partitioned")
    right = (folder / "partitioned_as_it_is" / "backend.py").read_text()
    assert right.count(COMPILED) == 1
    wrong = right.replace(COMPILED, "stop = min(first + 256, max(held, 1))")
    return load("compiled_for_256", {"backend.py": wrong}, folder, "partitioned")


def test_a_named_set_is_asked_at_level_quick(compiled_for_256):
    where = {"options": "partition=512", "phase": "decode"}
    failed = [r for r in run(compiled_for_256, where=where, stop_at_first=True) if r.outcome == "failed"]
    assert failed
    assert failed[0].case.id.endswith("@partition=512")
    # The case runs again from its text, without anything else being said about options.
    assert run(compiled_for_256, [failed[0].case])[0].outcome == "failed"
    plain = {"options": "given", "phase": "decode", "context": "257-512"}
    assert {r.outcome for r in run(compiled_for_256, where=plain)} == {"passed", "unsupported"}


def test_what_is_named_has_to_be_an_option():
    odd = type("Odd", (TorchSpec,), {"name": "odd", "conform_options": ({"partition": 512},)})
    failed = [r for r in run(odd, where=None, stop_at_first=True) if r.outcome == "failed"]
    assert [r.case.id for r in failed] == ["L0.options"]
    assert "partition" in failed[0].reason


def test_torch_under_every_layout_at_level_full():
    asked = {c.options_name for c in selected("torch", level="full")}
    assert {"given", "layout=hnd", "layout=kv_first", "kernel_block_size=16,layout=kv_first"} == asked
    assert {c.options_name for c in selected("torch")} == {"given", "kernel_block_size=16,layout=kv_first"}


class Order(Enum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Many:
    """Options of every kind whose values are known, and one whose values are not."""

    fast: bool = False
    kind: Literal["a", "b"] = "a"
    order: Order = Order.ROWS
    shape: str = field(default="x", metadata={"choices": ("x", "y")})
    size: int = 4


def test_every_choice_and_boolean_is_found():
    odd = type("Odd", (TorchSpec,), {"name": "odd", "Config": Many})
    target = open_backend(odd, None, here()).target
    assert choices(target) == [{"fast": True}, {"kind": "b"}, {"order": Order.COLUMNS}, {"shape": "y"}]
