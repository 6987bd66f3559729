"""The conformance kit: proves any attention backend, ours or a stranger's. Imports no torch until used.

from kvcore.testing import run
results = run("torch")                      # or run(MySpec, level="full")
failed = [r for r in results if r.outcome == "failed"]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.testing.cases import Base, Case, Seq
    from kvcore.testing.catalogue import all_cases, cover
    from kvcore.testing.conformance import BackendConformance
    from kvcore.testing.outcome import CellResult
    from kvcore.testing.report import conform
    from kvcore.testing.runner import run

_HOMES = {
    "BackendConformance": "kvcore.testing.conformance",
    "Base": "kvcore.testing.cases",
    "Case": "kvcore.testing.cases",
    "CellResult": "kvcore.testing.outcome",
    "Seq": "kvcore.testing.cases",
    "all_cases": "kvcore.testing.catalogue",
    "conform": "kvcore.testing.report",
    "cover": "kvcore.testing.catalogue",
    "run": "kvcore.testing.runner",
}
__all__ = ["BackendConformance", "Base", "Case", "CellResult", "Seq", "all_cases", "conform", "cover", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvcore.testing' has no attribute {name!r}")
