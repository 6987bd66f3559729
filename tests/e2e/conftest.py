from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, fetched and converted once a machine."""
    from kvcore.models.home import ensure_model

    return ensure_model()
