"""Axes: what the table of the docs says of them, and that planted faults die by one axis alone."""

from collections import Counter

import pytest
from conformance.mutants.kills import LEVEL_0, axes_alone, beyond, plain, quick_cases, recorded
from conformance.mutants.pages import DOCS
from conformance.mutants.table import MUTANTS

from kvcore.testing.cases.case import AXES
from kvcore.testing.cases.extents import BOUNDS

BY_NAME = {m.name: m for m in MUTANTS}
# Axes for which two faults were found out to die by them alone.
NEEDED = {*BOUNDS, "head_dim", "options"}


def afresh(name, folder):
    mutant = BY_NAME[name]
    spec = mutant.spec(folder, "alone")
    return axes_alone(mutant, spec)


def test_axes_kill_two_faults_each_that_nothing_else_kills():
    counts = Counter(axis for kill in recorded().values() for axis in kill.get("axes", ()))
    assert [axis for axis in sorted(NEEDED) if counts[axis] < 2] == []
    assert set(counts) <= set(AXES)


def test_the_table_holds_every_axis():
    lines = (DOCS / "axes.md").read_text().splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert rows[1:] == list(AXES)


def test_the_plainest_cases_are_beyond_nothing():
    assert plain("alibi") == {"false"}
    assert plain("context") == {"1-256"}
    by_id = {c.id: c for c in quick_cases()}
    assert {beyond(c) for name, c in by_id.items() if name.startswith("L2.attend.base.")} == {frozenset()}
    assert beyond(by_id["L2.attend.softcap=1.5.prefill"]) == {"softcap"}
    assert beyond(by_id["L3.attend.kin=window.mixed"]) == {"mask", "window"}


def test_one_of_them_afresh(tmp_path):
    assert afresh("facts_by_kv_group", tmp_path) == recorded()["facts_by_kv_group"]["axes"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name, kill in recorded().items() if "axes" in kill and BY_NAME[name].level != LEVEL_0]
)
def test_all_of_them_afresh(name, tmp_path):
    assert afresh(name, tmp_path) == recorded()[name]["axes"]
