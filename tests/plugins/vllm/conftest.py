"""The adapter over the stand-in of vLLM."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from plugins.vllm import stand_in


@pytest.fixture
def bridge(monkeypatch):
    """The adapter's classes, over the stand-in, with the torch backend."""
    stand_in.install(monkeypatch)
    monkeypatch.setenv("KVCORE_BACKEND", "torch")
    monkeypatch.setenv("KVCORE_OPTIONS", "")
    names = ("plugin", "signatures", "attention", "layer", "builder", "serving")
    yield SimpleNamespace(**{n: import_module(f"kvcore_vllm.{n}") for n in names}, vllm=stand_in)
    for name in [n for n in sys.modules if n.partition(".")[0] == "kvcore_vllm"]:
        del sys.modules[name]
