"""Small sets, several processes, and reports that say what was not asked and not proven."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from kvcore.cli import main
from kvcore.errors import ConfigError, Refusal
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.testing import all_cases, conform, cover, run
from kvcore.testing.cases.case import AXES
from kvcore.testing.cases.covering import BUDGETS, unasked
from kvcore.testing.report.html import page
from kvcore.testing.report.table import text

TorchSpec = installed().backend("torch")
FEW = {"phase": "decode", "mask": "chunk"}


def registry_of(*specs):
    registry = Registry()
    registry.backends.update({spec.name: spec for spec in specs})
    return registry


def cost(cases):
    return sum(c.cost for c in cases if c.level != "L0")


def test_fast_is_a_covering_set_within_its_budget():
    fast, quick = all_cases("fast"), all_cases("quick")
    assert {c.id for c in fast} < {c.id for c in quick}
    assert cost(fast) <= BUDGETS["fast"] < cost(quick)
    assert {c.level for c in fast} == {c.level for c in quick}
    assert not {"sinks", "alibi", "dtype", "cache_dtype", "mask", "phase"} & unasked(quick, fast).keys()


def test_what_a_budget_leaves_out_is_told():
    cases = all_cases()
    assert unasked(cases, cover(cases)).keys() <= {"block_size"}
    left = unasked(cases, cover(cases, 500))
    assert left
    kept = {(axis, str(value).lower()) for c in cover(cases, 500) for axis, value in c.axes().items()}
    assert all((axis, value) not in kept for axis, values in left.items() for value in values)
    assert set(left) <= set(AXES)


@dataclass(frozen=True)
class StandIn:
    interpret: bool = False


def interpreted():
    """The torch backend where its device is missing."""

    class Interpreted(TorchSpec):
        name = "interpreted"
        Config = StandIn
        stand_ins = {"interpret": "interpreter"}

        @classmethod
        def unsupported_device(cls, facts, options):
            return None if options.interpret else Refusal("device", facts.kind, ["cuda"])

        @classmethod
        def layouts(cls, spec, facts, options):
            return TorchSpec.layouts(spec, facts, TorchSpec.Config())

        @classmethod
        def create(cls, device, options):
            return TorchSpec.create(device, TorchSpec.Config())

    return Interpreted


def test_what_is_interpreted_gets_a_covering_set(monkeypatch):
    monkeypatch.setitem(BUDGETS, "quick", 100)
    where = {"phase": "decode", "mask": "causal", "sinks": "true", "context": "1-256"}
    done = conform("interpreted,torch", where=where, registry=registry_of(interpreted(), TorchSpec))
    assert not done.failed
    mine, all_of_it = ([r.case.id for r in done.of(name)] for name in ("interpreted", "torch"))
    assert set(mine) < set(all_of_it)
    assert set(done.unasked) == {"interpreted"}
    assert "was not asked (cases=all asks it)" in text(done)
    assert "not asked</td>" in page(done)
    whole = conform("interpreted", where=where, registry=registry_of(interpreted()), cover_slow=False)
    # Which cases are asked once more under other options follows from what each backend takes.
    given = [r.case.id for r in whole.results if "@" not in r.case.id]
    assert given == [case for case in all_of_it if "@" not in case]
    assert whole.unasked == {}


def gone():
    """The torch backend where its library is missing."""

    class Gone(TorchSpec):
        name = "gone"

        @classmethod
        def unavailable(cls, options):
            return "libgone is not installed"

    return Gone


def test_a_missing_library_is_declared_only():
    done = conform("gone,torch", level="fast", registry=registry_of(gone(), TorchSpec))
    assert {r.proof for r in done.of("gone")} == {"declared"}
    assert {r.proof for r in done.of("torch")} == {"device"}
    assert [b["proof"] for b in done.as_dict()["backends"]] == [["declared"], ["device"]]
    assert not any(r.proven for r in done.of("gone"))
    assert {c.proven for c in done.matrix() if c.backend == "gone"} == {False}
    assert "anything but its declaration: libgone is not installed" in text(done)
    (level_0,) = [line for line in text(done).splitlines() if line.startswith("level         L0")]
    assert level_0.split("L0")[1].split() == ["declared", "only", "pass"]
    assert '<td class="declared"' in page(done)


def test_cases_run_in_several_processes():
    alone, together = run("torch", where=FEW), run("torch", where=FEW, jobs=2)
    assert [(r.case, r.outcome, r.error) for r in together] == [(r.case, r.outcome, r.error) for r in alone]


FRAGILE = """
import os
from {module} import {name} as TorchSpec

class Fragile(TorchSpec):
    name = "fragile"

    @classmethod
    def create(cls, device, options):
        made = super().create(device, options)
        right = made.attend
        def attend(layer, query, *rest):
            if layer.query.mask.chunk == 11:
                os._exit(11)
            right(layer, query, *rest)
        made.attend = attend
        return made
"""


def test_a_process_that_ends_takes_its_own_case_alone(tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE.format(module=TorchSpec.__module__, name=TorchSpec.__name__))
    code = (
        "from fragile import Fragile\nfrom kvcore.testing import all_cases, run\n"
        "chunks = [c for c in all_cases() if c.id.startswith('L2.attend.chunk=')][:3]\n"
        "for r in run(Fragile, chunks, jobs=2):\n    print(r.case.chunk, r.outcome, r.reason)\n"
    )
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=settings)
    said = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert {outcome for chunk, outcome, _ in said if chunk == "11"} == {"failed"}
    assert {outcome for chunk, outcome, _ in said if chunk != "11"} == {"passed"}
    assert "the process that ran it came to an end" in done.stdout


def test_what_another_process_cannot_import_is_refused():
    class Local(TorchSpec):
        pass

    with pytest.raises(ConfigError, match="another process cannot import") as caught:
        run(Local, where=FEW, jobs=2)
    assert caught.value.field == "jobs"


def test_the_slowest_cases_are_listed_on_demand(capsys):
    words = ["conform", "backend=torch", "level=fast", "where.phase=decode"]
    assert main([*words, "slowest=3"]) == 0
    shown = capsys.readouterr().out.partition("the slowest cases:")[2].strip().splitlines()
    seconds = [float(line.split()[0]) for line in shown]
    assert len(seconds) == 3
    assert seconds == sorted(seconds, reverse=True)
    assert main(words) == 0
    assert "slowest" not in capsys.readouterr().out


def test_a_level_that_does_not_exist():
    with pytest.raises(ConfigError, match="no such level"):
        run("torch", level="thorough")
