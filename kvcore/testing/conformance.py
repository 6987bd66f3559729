"""`BackendConformance`: the kit as a test class to inherit from. Imports no torch until a test runs.

from kvcore.testing import BackendConformance
from my_backend.spec import MySpec

class TestMyBackend(BackendConformance):
spec = MySpec
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvcore.attention.declaration import BackendSpec
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CellResult


class BackendConformance:
    """One test for each case, found by pytest in any class that inherits this one.

    Attributes:
        spec: The declaration, or the name of an installed backend.
        level: ``quick`` or ``full``.
        options: An instance of its `Config`; None is the default.
        where: Axis values that a case must have.
    """

    spec: ClassVar[type[BackendSpec] | str]
    level: ClassVar[str] = "quick"
    options: ClassVar[Any] = None
    where: ClassVar[dict[str, str]] = {}

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """One test for each case that applies to the backend."""
        if "kvcore_case" in metafunc.fixturenames:
            found = cases_for(cls.spec, cls.level, cls.options, cls.where)
            metafunc.parametrize("kvcore_case", found, ids=[c.id for c in found])

    def test_conformance(self, kvcore_case: Case) -> None:
        """The case passes; what is unsupported or cannot run here is skipped with the reason."""
        settle(run_one(self.spec, kvcore_case, self.options), self.spec, self.options)


def cases_for(
    spec: type[BackendSpec] | str, level: str, options: Any = None, where: dict[str, str] | None = None
) -> list[Case]:
    """The cases of a backend, found without running a kernel.

    Raises:
        ConfigError: There is none; pytest would call an empty class skipped.
    """
    from kvcore.testing.checks.runner import nothing_selected, selected

    found = selected(spec, level=level, options=options, where=where or {})
    if not found:
        raise nothing_selected(where or {})
    return found


def run_one(spec: type[BackendSpec] | str, case: Case, options: Any = None) -> CellResult:
    """The result of one case."""
    from kvcore.testing.checks.runner import CONTRACT, run

    # A backend that cannot be asked for its cases has this one, and asking is what fails.
    return run(spec, None if case is CONTRACT else [case], options=options)[0]


def settle(result: CellResult, spec: type[BackendSpec] | str | None = None, options: Any = None) -> None:
    """A result as pytest's outcome, for a backend that `spec` declares or that is installed under its name.

    A failure shows the reproducer of `kvcore conform`, of the case as it is: to make it smaller is to run
    it many times, and here every case that fails would pay for that.
    """
    if result.outcome == "failed":
        from kvcore.testing.report.reproducer import source

        again = source(result, spec=spec, options=options)
        pytest.fail(f"{result.backend}: {result.reason}\n\n{again}", pytrace=False)
    if result.outcome != "passed":
        pytest.skip(f"{result.outcome}: {result.reason}")
