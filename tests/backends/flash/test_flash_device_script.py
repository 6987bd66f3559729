"""The script for a GPU machine runs; here over the emulations, where its times mean nothing."""

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "gpu" / "flash_device.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("flash_device", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script itself is run there")
@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_speed_of_small_shapes(script, name):
    shapes = {
        "decode": script.Shape(2, 300, 1, 4, 2, 64),
        "window": script.Shape(2, 300, 1, 4, 2, 64, window=100),
        "chunk": script.Shape(2, 300, 20, 4, 2, 64),
    }
    with torch.inference_mode():
        found = script.speed(name, shapes, "float16", rounds=2)
    assert found["proof"] == "emulated"
    for label in shapes:
        assert found[label]["prepare_ms"] > 0
        assert found[label]["attend_ms"] > 0
