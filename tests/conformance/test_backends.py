"""Every registered backend at quick level; what cannot run here is skipped with its reason.

A device runs every case. An interpreter or an emulation is slow, and runs the set that covers every check
and every value of every axis once as far as its budget reaches; all of its cases run with the long tests.
"""

import pytest

from kvcore.registry.loader import installed
from kvcore.testing import cover, run
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.checks.runner import selected
from kvcore.testing.report.reproducer import source

NAMES = sorted(installed().backends)
# Most cost of what an interpreter or an emulation is asked: about a minute of Triton's interpreter.
SLOW = 7_000


def proof(name):
    spec = installed().backend(name)
    target, _ = switch_on(spec, spec.Config(), here())
    return spec.proof(target.options, target.facts)


def fail_together(results):
    failed = [r for r in results if r.outcome == "failed"]
    assert not failed, "\n".join(f"{r.case.id}: {r.reason}\n{source(r)}" for r in failed[:3])


@pytest.mark.parametrize("name", NAMES)
def test_conformance(name):
    cases = selected(name)
    results = run(name, cases if proof(name) == "device" else cover(cases, SLOW), probe_refused=proof(name) == "device")
    fail_together(results)
    ran = [r for r in results if r.case.level != "L0" and r.outcome != "skipped"]
    if not ran:
        pytest.skip(next(r.reason for r in results if r.outcome == "skipped"))
    assert {r.case.level for r in ran if r.outcome == "passed"} >= {"L1", "L2", "L3", "L4"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_case(name, level):
    fail_together(run(name, level=level))
