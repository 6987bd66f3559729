"""Shared by all tests: hypothesis profiles, and where the repository and the optional data lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One OpenMP thread in each worker: two workers on two cores would otherwise fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The default run is repeatable: a red run tells of a change, not of luck. The long run draws afresh.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", max_examples=100, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("KVCORE_TEST_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: the workers then finish together, and one makes what they share."""
    items.sort(key=lambda item: "test_greedy_parity" not in item.nodeid)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data(repo: Path) -> Path:
    """Large data that lies beside the repository; tests that need it skip where it is absent."""
    folder = repo.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the optional data folder is not beside the repository")
    return folder
