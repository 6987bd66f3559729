"""Hostile backends in one run with honest ones: each ends in a clear outcome, and none ends the run."""

import json

import pytest
from conformance.mutants.hostile import HOSTILE
from conformance.mutants.mutant import load

from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.testing import conform
from kvcore.testing.report import conform as report

BY_NAME = {h.name: h for h in HOSTILE}
# Few cases, all of levels 2 to 4, in which every one of them has a chance to do harm.
WHERE = {"sinks": "true", "context": "1-256", "sequences": "1-8", "kv_heads": "1-3"}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """What `kvcore conform backend=all output=json` says of all of them."""
    folder = tmp_path_factory.mktemp("hostile")
    registry = Registry()
    registry.backends["reference"] = load("mutant_of_nothing", {}, folder)
    registry.backends.update({h.name: h.spec(folder) for h in HOSTILE})
    registry.backends["torch"] = installed().backend("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "REPRODUCING_SECONDS", 1.0)  # how failures are made again is another test's
        return json.loads(json.dumps(conform("all", where=WHERE, registry=registry).as_dict()))


def cells(document, name):
    """The cells of a backend that the honest reference passes; it refuses some quantized formats."""
    served = {c["id"] for c in document["cases"] if c["backend"] == "reference" and c["outcome"] == "passed"}
    found = [c for c in document["cases"] if c["backend"] == name]
    return [c for c in found if c["id"] in served] or found


def test_the_run_reaches_everybody(document):
    assert {b["name"] for b in document["backends"]} == {"reference", "torch", *BY_NAME}
    for honest in ("reference", "torch"):
        assert {c["outcome"] for c in cells(document, honest)} == {"passed"}
        assert "failed" not in {c["outcome"] for c in document["cases"] if c["backend"] == honest}


@pytest.mark.parametrize("name", BY_NAME)
def test_outcome(document, name):
    hostile = BY_NAME[name]
    found = cells(document, name)
    assert {c["outcome"] for c in found} == {hostile.outcome}
    assert all(c["reason"] for c in found)
    assert any(hostile.words in c["reason"] for c in found), {c["reason"] for c in found}
    summary = next(b["summary"] for b in document["backends"] if b["name"] == name)
    assert summary[hostile.outcome] >= len(found) > 0
    assert summary["passed"] == 0
