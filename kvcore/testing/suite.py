"""The kit as a test file: ``pytest --pyargs kvcore.testing.suite --kvcore-backend NAME``."""

from __future__ import annotations

import pytest

from kvcore.testing.cases.case import Case
from kvcore.testing.conformance import cases_for, run_one, settle


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each backend and case.

    Raises:
        UnknownBackendError: A name that nobody declares, or no name and nobody declares any.
    """
    from kvcore.errors import UnknownBackendError
    from kvcore.registry.loader import installed

    names = metafunc.config.getoption("--kvcore-backend") or sorted(installed().backends)
    if not names:
        raise UnknownBackendError(
            "no backend is installed, so that there is nothing to judge",
            field="--kvcore-backend",
            remedy="install one, or repair its plugin (see `kvcore backends`)",
        )
    level = metafunc.config.getoption("--kvcore-level")
    found = [(name, case) for name in names for case in cases_for(name, level)]
    ids = [f"{name}-{case.id}" for name, case in found]
    metafunc.parametrize(("kvcore_backend", "kvcore_case"), found, ids=ids)


def test_conformance(kvcore_backend: str, kvcore_case: Case) -> None:
    """The case passes; what is unsupported or cannot run here is skipped with the reason."""
    settle(run_one(kvcore_backend, kvcore_case))
