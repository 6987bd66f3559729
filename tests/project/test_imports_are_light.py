"""`import kvcore` and the logical half load nothing heavy, asserted on sys.modules of a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "hydra",
    "omegaconf",
    "pluggy",
    "triton",
    "flash_attn",
    "flashinfer",
    "vllm",
    "safetensors",
)


def loaded_after(*statements: str) -> set[str]:
    """Heavy modules in sys.modules of a new process after these statements."""
    code = "\n".join([*statements, "import sys", "print(*sys.modules, file=sys.stderr)"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(HEAVY) & set(result.stderr.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import kvcore",
        "import kvcore; kvcore.plan",
        "import kvcore.plan.planner, kvcore.plan.explain",
        "import kvcore.manage.policies.eviction",
        "import kvcore.attention.declaration, kvcore.attention.query",
    ],
)
def test_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == set()


def test_the_manager_takes_arrays_and_nothing_else() -> None:
    assert loaded_after("import kvcore.manage.manager, kvcore.manage.block_pool") == {"numpy"}


@pytest.mark.parametrize("backend", ["torch", "triton", "flash_attn", "flashinfer", "vllm_cpu"])
def test_declarations_import_neither_torch_nor_their_library(backend: str) -> None:
    heavy = loaded_after(f"import kvcore_{backend}.plugin, kvcore_{backend}.declaration")
    assert heavy <= {"pluggy"}


def test_help_is_light() -> None:
    call = "\ntry: main(['--help'])\nexcept SystemExit as e: assert not e.code"
    assert loaded_after("from kvcore.cli import main" + call) == set()


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_after("import numpy") == {"numpy"}
