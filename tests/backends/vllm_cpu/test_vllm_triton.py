"""vLLM's Triton attention, judged through Triton's interpreter; run by `make test-engines`."""

import json
import os
import subprocess
import sys

import pytest
from backends.vllm_cpu import triton_attention


@pytest.fixture(scope="module")
def judged(wheel, repo):
    """In a process of its own: Triton asks once, when it is imported, whether it is to interpret."""
    command = [sys.executable, triton_attention.__file__, str(wheel.file.parent)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=repo, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kit_passes_on_what_the_adapter_declares(judged):
    assert [row for row in judged["kit"] if row[1] == "failed"] == []
    assert sum(outcome == "passed" for _, outcome, _ in judged["kit"]) > 30


def test_what_it_gets_wrong_is_found_by_the_kit(judged):
    assert judged["wrong"] == dict.fromkeys(triton_attention.WRONG, "failed")
