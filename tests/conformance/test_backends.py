"""Every registered backend at quick level; what cannot run here is skipped with its reason."""

import pytest

from kvcore.registry.loader import installed
from kvcore.testing import run
from kvcore.testing.reproducer import source


@pytest.mark.parametrize("name", sorted(installed().backends))
def test_conformance(name):
    results = run(name)
    failed = [r for r in results if r.outcome == "failed"]
    assert not failed, "\n".join(f"{r.case.id}: {r.reason}\n{source(r)}" for r in failed[:3])
    ran = [r for r in results if r.case.level != "L0" and r.outcome != "skipped"]
    if not ran:
        pytest.skip(next(r.reason for r in results if r.outcome == "skipped"))
    assert {r.case.level for r in ran if r.outcome == "passed"} >= {"L1", "L2", "L3", "L4"}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(installed().backends))
def test_conformance_at_full_level(name):
    assert [(r.case.id, r.reason) for r in run(name, level="full") if r.outcome == "failed"] == []
