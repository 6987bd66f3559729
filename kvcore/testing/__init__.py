"""The conformance kit: proves any attention backend, ours or a stranger's. Imports no torch until used.

from kvcore.testing import run
results = run("torch")                      # or run(MySpec, level="full")
failed = [r for r in results if r.outcome == "failed"]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.testing.cases.case import Base, Case, Seq
    from kvcore.testing.cases.catalogue import all_cases
    from kvcore.testing.cases.covering import cover
    from kvcore.testing.cases.outcome import CellResult
    from kvcore.testing.checks.runner import run
    from kvcore.testing.conformance import BackendConformance
    from kvcore.testing.report.conform import conform

_HOMES = {
    "BackendConformance": "kvcore.testing.conformance",
    "Base": "kvcore.testing.cases.case",
    "Case": "kvcore.testing.cases.case",
    "CellResult": "kvcore.testing.cases.outcome",
    "Seq": "kvcore.testing.cases.case",
    "all_cases": "kvcore.testing.cases.catalogue",
    "conform": "kvcore.testing.report.conform",
    "cover": "kvcore.testing.cases.covering",
    "run": "kvcore.testing.checks.runner",
}
__all__ = ["BackendConformance", "Base", "Case", "CellResult", "Seq", "all_cases", "conform", "cover", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvcore.testing' has no attribute {name!r}")
