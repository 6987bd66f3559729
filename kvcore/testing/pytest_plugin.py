"""The pytest plugin: ``pytest --pyargs kvcore.testing.suite --kvcore-backend NAME``. Imports no torch."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options of the suite."""
    group = parser.getgroup("kvcore", "the conformance kit of kvcore")
    group.addoption(
        "--kvcore-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="an installed backend that kvcore.testing.suite judges; repeatable; default: every one",
    )
    group.addoption(
        "--kvcore-level",
        choices=("fast", "quick", "full"),
        default="quick",
        help="how many cases kvcore.testing.suite runs",
    )
