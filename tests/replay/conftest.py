"""The cuts of published traces."""

from __future__ import annotations

import pytest
from support.replays import DATA

from kvcore.replay.trace import read_trace


@pytest.fixture(scope="session")
def cut():
    """The beginning of a published trace, by name."""
    return lambda name: read_trace(DATA / "traces" / name)
