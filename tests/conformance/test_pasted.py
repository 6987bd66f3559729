"""Every failing case of ten random mutants fails again from its printed script, in a fresh process."""

import random

import pytest
from conformance.mutants.mutant import Mutant, load
from conformance.mutants.table import MUTANTS
from support.fresh import pasted

from kvcore.registry.registry import Registry
from kvcore.testing import Case, CellResult, Seq, all_cases, conform, cover, run
from kvcore.testing.report.html import page
from kvcore.testing.report.reproducer import script
from kvcore.testing.report.reproduction import REPEATS, Reproduction, reproduce, shortest

TEN = random.Random(11).sample(MUTANTS, 10)
# A fault of the instance: right at first, wrong from the third step on.
THIRD_STEP = Mutant(
    "from_the_third_step_on",
    "L3",
    "right twice, and then never again",
    "backend.py",
    "out[step.rows] = result.to(out.dtype)",
    'self.steps = self.__dict__.get("steps", 0) + (step is metadata.sequences[0])\n'
    "out[step.rows] = (result * (1.5 if self.steps > 2 else 1.0)).to(out.dtype)",
    cases=("steps",),
)


def fails_again(scripts, folder):
    """The scripts that no longer fail."""
    printed = pasted(list(scripts.values()), folder)
    assert len(printed) == len(scripts)
    return {
        case: (scripts[case], text)
        for case, text in zip(scripts, printed, strict=True)
        if not any(line.startswith("failed") for line in text.splitlines())
    }


@pytest.mark.parametrize("mutant", TEN[:3], ids=lambda m: m.name)
def test_every_failure_of_its_level_does(mutant, tmp_path):
    spec = mutant.spec(tmp_path, "pasted")
    cases = mutant.selected()[:12] + [c for c in cover(all_cases(), 2_000) if c.level != "L0"]
    failed = [r for r in run(spec, cases, probe_refused=False) if r.outcome == "failed"]
    assert failed
    assert fails_again({r.case.id: script(r, spec=spec) for r in failed}, tmp_path) == {}


@pytest.mark.long
@pytest.mark.parametrize("mutant", TEN, ids=lambda m: m.name)
def test_every_failure_does(mutant, tmp_path):
    spec = mutant.spec(tmp_path, "wholly_pasted")
    registry = Registry()
    registry.backends[spec.name] = spec
    done = conform(spec.name, registry=registry)
    assert len(done.scripts) == len(done.failed)
    assert fails_again(done.scripts, tmp_path) == {}


@pytest.fixture
def third_step(tmp_path):
    """A backend that is wrong from the third step of an instance on."""
    return load("third_step", {THIRD_STEP.file: THIRD_STEP.source()}, tmp_path)


def test_a_fault_of_the_shared_instance_brings_its_cases(third_step, tmp_path):
    cases = [c for c in all_cases() if c.level == "L2"][:12]
    failed = [r for r in run(third_step, cases) if r.outcome == "failed"]
    assert failed
    assert all(len(r.after) == 2 for r in failed)
    text = script(failed[0], spec=third_step, smaller=True)
    assert "The last case fails only after the 2 cases before it" in text
    assert text.count("Case(") == 3
    (said,) = pasted([text], tmp_path)
    assert [line.split()[0] for line in said.splitlines()] == ["passed", "passed", "failed"]


def test_the_page_shows_the_script_of_every_failure(third_step):
    registry = Registry()
    registry.backends[third_step.name] = third_step
    done = conform(third_step.name, registry=registry, where={"phase": "decode", "mask": "window", "window": "P+1"})
    shown = page(done)
    assert done.failed
    for i, result in enumerate(done.failed):
        assert f'href="#f{i}"' in shown
        assert f'id="f{i}"' in shown
        assert result.case.id in shown
    assert shown.count("for result in run(") == len(done.failed)


CASE = Case("L2.attend.base.mixed", "L2", "attend", seqs=(Seq(8, 1), Seq(0, 9)), num_kv_heads=2, sinks=True)
BEFORE = tuple(Case(f"L2.attend.{i}.mixed", "L2", "attend", seqs=(Seq(0, i + 1),)) for i in range(9))
FAILED = CellResult(CASE, "torch", "failed", "device", "out at token 3 is wrong", after=BEFORE)


def test_the_smallest_case_has_the_same_kind_of_failure():
    def reasons(cases):
        # Without a second sequence it fails in another way, which is another fault.
        return ["out at token 1 is off" if len(c.seqs) > 1 else "raised IndexError: 7" for c in cases]

    (least,) = reproduce(FAILED, reasons, smaller=True).cases
    assert least.seqs == (Seq(1, 1), Seq(0, 1))
    assert (least.num_kv_heads, least.gqa, least.sinks) == (1, 1, False)


def test_the_fewest_cases_before_it():
    needed = [BEFORE[2], BEFORE[5]]
    assert shortest(list(BEFORE), lambda cases: all(c in cases for c in needed)) == needed
    assert shortest(list(BEFORE), lambda cases: BEFORE[8] in cases) == [BEFORE[8]]
    assert shortest(list(BEFORE), lambda cases: False) == []
    assert shortest([], lambda cases: True) == []


def test_a_fault_that_comes_and_goes_is_run_several_times():
    calls = iter(range(10_000))

    def reasons(cases):
        return ["out at token 0 is off" if next(calls) % 5 == 4 else None for _ in cases]

    again = reproduce(FAILED, reasons, smaller=True)
    assert again.cases == (CASE,) * REPEATS
    assert "comes and goes" in again.note


def test_what_does_not_fail_again_says_so():
    again = reproduce(FAILED, lambda cases: [None] * len(cases), smaller=True)
    assert again == Reproduction((CASE,), "It did not fail again, alone or after the 9 cases that ran before it.")
    assert "Not tried again" in reproduce(FAILED, lambda cases: [None], smaller=True, seconds=0.0).note
