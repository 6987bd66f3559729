"""The reproducer is pasted into a fresh Python: it fails there as it failed here, options and all."""

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import pytest

from kvcore.attention.declaration import DeviceFacts
from kvcore.registry.registry import Registry
from kvcore.testing import Case, CellResult, Seq, conform, run
from kvcore.testing.conformance import cases_for, run_one, settle
from kvcore.testing.report.as_source import Source
from kvcore.testing.report.reproducer import source

# Right as it comes; wrong under either option. The others are wrong in their declarations.
PACKAGE = """
from dataclasses import dataclass
from kvcore.errors import Refusal
from kvcore_torch.declaration import TorchBackendSpec, TorchOptions

class Liar(TorchBackendSpec):
    name = "liar"

    @dataclass(frozen=True)
    class Config(TorchOptions):
        scale: float = 1.0
        emulate: bool = False

    @classmethod
    def create(cls, device, options):
        made = super().create(device, options)
        right = made.attend
        def attend(layer, query, cache, metadata, out, lse=None):
            right(layer, query, cache, metadata, out, lse)
            out.mul_(1.5 if options.emulate else options.scale)
        made.attend = attend
        return made

class Elsewhere(Liar):
    name = "elsewhere"
    priority = {"rocm": 1}
    stand_ins = {"emulate": "emulated"}

    @classmethod
    def unsupported_device(cls, facts, options):
        return None if options.emulate else Refusal("device", facts.kind, ["rocm"])

class Vague(Liar):
    name = "vague"
    deterministic = "mostly"

class Empty(Liar):
    name = "empty"
    @classmethod
    def layouts(cls, spec, facts, options):
        return ()

class Newer(Liar):
    name = "newer"
    api_version = 2

class Raises(Liar):
    name = "raises"
    @classmethod
    def unavailable(cls, options):
        raise KeyError("no such library")

class Broken(Liar):
    name = "broken"
    @classmethod
    def unsupported(cls, query, options):
        raise KeyError("no such fact")
"""
WHERE = {"phase": "decode", "sinks": "true", "context": "1-256", "sequences": "1-8", "heads": "1-16"}


@pytest.fixture
def liars(tmp_path, monkeypatch):
    """A module of backends that any process finds on its path, and that nobody installed."""
    (tmp_path / "liars.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("liars")
    del sys.modules["liars"]


def registry_of(*specs):
    registry = Registry()
    registry.backends.update({spec.name: spec for spec in specs})
    return registry


def pasted(text, folder):
    """What the text prints in a Python that knows nothing of this one."""
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, env=settings, cwd=folder
    )
    assert not done.stderr
    return done.stdout


def test_options_are_in_it(liars, tmp_path):
    options = liars.Liar.Config(scale=1.5)
    assert not conform("liar", where=WHERE, registry=registry_of(liars.Liar)).failed
    done = conform("liar", where=WHERE, options={"liar": options}, registry=registry_of(liars.Liar))
    assert done.reproducer is not None
    assert "options=Liar.Config(scale=1.5)" in done.reproducer
    assert pasted(done.reproducer, tmp_path).startswith("failed")


def test_stand_ins_are_in_it(liars, capsys):
    done = conform("elsewhere", where=WHERE, registry=registry_of(liars.Elsewhere), facts=DeviceFacts("cpu"))
    assert done.reproducer is not None
    assert "options=Liar.Config(emulate=True), facts=DeviceFacts(kind='cpu')" in done.reproducer
    exec(done.reproducer, {})
    assert capsys.readouterr().out.startswith("failed")


def test_an_installed_backend_goes_by_its_name():
    case = Case("L2.attend.base.mixed", "L2", "attend", seqs=(Seq(0, 3),))
    text = source(CellResult(case, "triton", "failed", "interpreter"), facts=DeviceFacts("cpu"))
    assert "from kvcore_triton.options import TritonOptions" in text
    assert "run('triton', " in text
    assert "options=TritonOptions(interpret=True), facts=DeviceFacts(kind='cpu')" in text


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("Vague", "run(Vague, stop_at_first=True)"),
        ("Newer", "run(Newer, stop_at_first=True)"),
        ("Raises", "run(Raises, stop_at_first=True)"),
        ("Empty", "run(Empty, [case])"),
    ],
)
def test_a_declaration_has_one_too(liars, name, call, capsys):
    spec = getattr(liars, name)
    first = next(r for r in run(spec, stop_at_first=True) if r.outcome == "failed")
    assert first.case.level == "L0"
    text = source(first, spec=spec)
    assert call in text
    exec(text, {})
    assert "failed" in capsys.readouterr().out


def test_the_report_prints_it_for_a_declaration(liars):
    """And what could not be asked at all comes last."""
    done = conform("newer", registry=registry_of(liars.Newer))
    assert done.reproducer is not None
    assert "run(Newer, stop_at_first=True)" in done.reproducer
    options = {"liar": liars.Liar.Config(scale=1.5)}
    both = conform("newer,liar", where=WHERE, options=options, registry=registry_of(liars.Newer, liars.Liar))
    assert both.reproducer is not None
    assert "run(Liar, [case]" in both.reproducer


def test_a_refused_plugin_has_one_too(monkeypatch, capsys):
    registry = Registry()
    registry.refused["old"] = "two plugins declare it"
    done = conform("old", registry=registry)
    assert done.reproducer is not None
    monkeypatch.setattr("kvcore.testing.report.conform.installed", lambda: registry)
    exec(done.reproducer, {})
    assert capsys.readouterr().out == "failed two plugins declare it\n"


def test_pytest_prints_the_same(liars):
    options = liars.Liar.Config(scale=1.5)
    done = conform("liar", where=WHERE, options={"liar": options}, registry=registry_of(liars.Liar))
    case = min((r.case for r in done.failed), key=lambda c: c.cost)
    result = run_one(liars.Liar, case, options)
    with pytest.raises(pytest.fail.Exception) as shown:
        settle(result, liars.Liar, options)
    said = str(shown.value)
    assert said.endswith(source(result, spec=liars.Liar, options=options))
    # The command's is the same but for the case, which it has made smaller.
    assert said.partition("for result in")[2] == done.reproducer.partition("for result in")[2]


@pytest.mark.parametrize("name", ["Raises", "Broken"])
def test_pytest_fails_what_cannot_be_asked(liars, name):
    spec = getattr(liars, name)
    (case,) = cases_for(spec, "quick")
    result = run_one(spec, case)
    assert result.outcome == "failed"
    with pytest.raises(pytest.fail.Exception, match=f"run\\({name}, stop_at_first=True\\)"):
        settle(result, spec)


class Colour(Enum):
    """An option's values."""

    RED = 1


@dataclass(frozen=True)
class Inner:
    """A node of options."""

    sizes: tuple[int, ...] = ()
    colour: Colour | None = None


@dataclass(frozen=True)
class Outer:
    """Options with a node of their own."""

    limit: float = 0.0
    inner: Inner = field(default_factory=Inner)
    by_name: dict[str, list[float]] = field(default_factory=dict)


@pytest.mark.parametrize(
    "value",
    [
        Outer(),
        Outer(limit=float("inf")),
        Outer(inner=Inner((3,), Colour.RED), by_name={"a'b": [1.5, float("-inf")]}),
        Outer(inner=Inner((1, 2))),
    ],
)
def test_values_as_source(value, monkeypatch):
    here = SimpleNamespace(Colour=Colour, Inner=Inner, Outer=Outer)
    monkeypatch.setitem(sys.modules, __name__, here)  # tests have no module that can be imported
    text = Source()
    shown = text.value(value)
    names: dict[str, object] = {}
    exec(text.imports(), names)
    assert eval(shown, names) == value


def test_a_class_that_no_import_reaches_is_named():
    class Hidden:
        pass

    text = Source()
    assert text.name(Hidden) == "Hidden"
    assert text.imports().startswith("# Hidden is ")
