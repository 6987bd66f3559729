"""The kit kills what is broken: every mutant dies by a case of its level, and no level can be left out."""

from collections import Counter
from functools import partial

import pytest
from conformance.mutants.kills import first_kill, killing_levels, recorded
from conformance.mutants.mutant import below, load
from conformance.mutants.pages import COMMAND, REPORTS, pages
from conformance.mutants.table import MUTANTS

from kvcore.testing import cover, run
from kvcore.testing.cases.case import LEVELS
from kvcore.testing.cases.covering import BUDGETS
from kvcore.testing.cases.extents import BOUNDS

BY_NAME = {m.name: m for m in MUTANTS}
VICTIMS = sorted({m.victim for m in MUTANTS})
# One mutant a level that no other level kills, cheap to prove: the kit without the level calls it right.
ALONE = {
    "L0": "accepts_any_device",
    "L1": "padding_only_at_the_end",
    "L2": "shared_layers_read_nothing",
    "L3": "offsets_of_31_bits",
    "L4": "lse_of_nothing_is_inf",
    "L5": "divides_by_place",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutants")


class Unbroken:
    """The victims as they are; each case is run once, whichever mutants ask."""

    def __init__(self, folder):
        self.specs = {name: load(f"{name}_as_it_is", {}, folder, name) for name in VICTIMS}
        self.ended = {}

    def outcomes(self, victim, cases):
        left = [c for c in cases if (victim, c) not in self.ended]
        self.ended |= {(victim, r.case): r.outcome for r in run(self.specs[victim], left, probe_refused=False)}
        return [self.ended[victim, c] for c in cases if (victim, c) in self.ended]


@pytest.fixture(scope="module")
def unbroken(folder):
    return Unbroken(folder)


def test_the_list():
    assert len(BY_NAME) == len(MUTANTS) >= 40
    per_level = Counter(m.level for m in MUTANTS)
    assert all(per_level[level] >= 5 for level in LEVELS)
    lines = Counter((m.victim, m.file, m.line) for m in MUTANTS)
    assert [at for at, count in lines.items() if count > 1] == []
    assert {r for m in MUTANTS for r in m.reports} == set(REPORTS)
    assert all(m.selected() for m in MUTANTS)


@pytest.mark.parametrize("name", BY_NAME)
def test_killed(name, folder, unbroken):
    mutant = BY_NAME[name]
    killer, reason = first_kill(mutant, mutant.spec(folder))
    assert killer, f"no case of {mutant.level} notices: {mutant.broken}"
    assert reason
    # The same cases, up to the one that kills, pass where nothing is broken.
    cases = mutant.selected()
    until = [c.id for c in cases].index(killer) + 1
    outcomes = unbroken.outcomes(mutant.victim, cases[:until])
    assert "failed" not in outcomes
    assert outcomes[-1] == "passed"
    assert recorded()[name]["case"] == killer, f"out of date: run `{COMMAND} {name}`"


@pytest.mark.parametrize("level", LEVELS)
def test_no_level_can_be_left_out(level, folder):
    """The cheap covering set of all other levels finds nothing wrong; the whole kit does so in the long run."""
    mutant = BY_NAME[ALONE[level]]
    assert mutant.level == level
    others = tuple(n for n in LEVELS if n != level)
    spec = mutant.spec(folder, "left_out")
    assert killing_levels(spec, "quick", others, partial(cover, budget=BUDGETS["fast"] // 4)) == []


def test_every_axis_of_size_kills_what_nothing_smaller_kills():
    """At least two faults an axis; that nothing smaller notices them is shown in the long run."""
    axes = Counter(m.past[0] for m in MUTANTS if m.past)
    assert set(axes) == {*BOUNDS, "gqa", "head_dim"}
    assert min(axes.values()) >= 2


@pytest.mark.long
@pytest.mark.parametrize("name", [m.name for m in MUTANTS if m.past])
def test_nothing_smaller_notices(name, folder):
    mutant = BY_NAME[name]
    spec = mutant.spec(folder, "below")
    results = run(spec, below(mutant.past), probe_refused=False)
    assert [r.case.id for r in results if r.outcome == "failed"] == []


def test_the_matrix():
    kills = recorded()
    assert list(kills) == list(BY_NAME)
    for mutant in MUTANTS:
        assert mutant.level in kills[mutant.name]["levels"]
    assert {level for level in LEVELS if [level] in [k["levels"] for k in kills.values()]} == set(LEVELS)
    assert all(kills[name]["levels"] == [level] for level, name in ALONE.items())


def test_the_pages_are_up_to_date():
    for path, text in pages(recorded()).items():
        assert path.read_text() == text, f"run `{COMMAND} -`, or with the names of mutants that are new"


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_levels_that_kill(name, folder):
    """The whole row of the matrix; for the mutants of ALONE, by the cases of level full too."""
    mutant = BY_NAME[name]
    spec = mutant.spec(folder, "whole")
    others = tuple(n for n in LEVELS if n != mutant.level)
    tier = "full" if name in ALONE.values() else "quick"
    assert killing_levels(spec, tier, others) == [n for n in recorded()[name]["levels"] if n in others]


@pytest.mark.long
@pytest.mark.parametrize("name", VICTIMS)
def test_the_unbroken_backends_pass_at_full_level(name, unbroken):
    results = run(unbroken.specs[name], level="full")
    assert [(r.case.id, r.reason) for r in results if r.outcome == "failed"] == []
    assert {r.case.level for r in results if r.outcome == "passed"} == set(LEVELS)
