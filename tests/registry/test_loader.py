"""The loader survives whatever plugins do, and names them when they are asked for."""

import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import distribution
from types import ModuleType

import pytest

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.attention.query import Capabilities
from kvcore.errors import ConfigError, PluginError, UnknownBackendError
from kvcore.registry.hookspecs import hookimpl
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource, installed_sources

CPU = DeviceFacts("cpu")


class FineSpec(BackendSpec):
    name = "fine"
    priority = {"cpu": 5}

    @classmethod
    def unavailable(cls, options):
        return None

    @classmethod
    def unsupported_device(cls, facts, options):
        return None

    @classmethod
    def unsupported(cls, query, options):
        return Capabilities(dtypes=("float32",)).check(query)

    @classmethod
    def layouts(cls, spec, facts, options):
        return []

    @classmethod
    def create(cls, device, options):
        raise AssertionError("never in these tests")


def variant(**changes):
    return type("Variant", (FineSpec,), changes)


def module(**hooks):
    made = ModuleType("some_plugin")
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))
    return made


def offering(*specs):
    return module(kvcore_backends=lambda: specs)


def source(name, plugin, dist=None, version="1.0"):
    def give():
        if isinstance(plugin, BaseException):
            raise plugin
        return plugin

    return PluginSource(name, dist or f"dist-{name}", version, give)


def test_a_sound_plugin_is_there_with_its_origin():
    registry = load([source("fine", offering(FineSpec), "acme-attn", "2.5")])
    assert registry.backend("fine") is FineSpec
    (record,) = registry.plugins
    assert (record.distribution, record.version, record.reason) == ("acme-attn", "2.5", None)
    assert record.provides == ["backend fine"]


@pytest.mark.parametrize("error", [ImportError("no module named gpu"), SystemExit(3), RuntimeError()])
def test_a_plugin_that_raises_at_import_is_recorded_and_named_when_asked_for(error):
    registry = load([source("gpu", error, "acme-gpu", "0.3"), source("fine", offering(FineSpec))])
    assert registry.backend("fine") is FineSpec
    assert type(error).__name__ in registry.plugins[0].reason
    with pytest.raises(UnknownBackendError) as caught:
        registry.backend("gpu")
    text = str(caught.value)
    assert "acme-gpu 0.3" in text
    assert type(error).__name__ in text
    assert caught.value.allowed == ["fine"]


def test_a_plugin_whose_hook_raises_is_recorded():
    def broken():
        raise ValueError("out of order")

    registry = load([source("bad", module(kvcore_backends=broken)), source("fine", offering(FineSpec))])
    assert registry.plugins[0].reason == "kvcore_backends raised ValueError: out of order"
    assert sorted(registry.backends) == ["fine"]


def test_two_plugins_of_one_backend_name_serve_nobody_and_both_are_named():
    twin = variant()
    registry = load([source("a", offering(FineSpec), "acme", "1.0"), source("b", offering(twin), "other", "2.0")])
    assert registry.backends == {}
    with pytest.raises(PluginError, match=r"acme 1\.0 and by other 2\.0"):
        registry.backend("fine")
    assert all("declared twice" in r.reason for r in registry.plugins)


def test_another_contract_version_is_refused_with_both_numbers():
    registry = load([source("next", offering(variant(name="next", api_version=2)))])
    with pytest.raises(PluginError, match=r"contract version 2, this core speaks 1"):
        registry.backend("next")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (variant(name="Upper"), "lower case"),
        (variant(name="a-b"), "lower case"),
        (variant(name="auto"), "not 'auto'"),
        (variant(name="x", Config=int), "not a dataclass"),
        (variant(name="x", max_offset_bits=40), "31 or 63"),
        (type("Half", (BackendSpec,), {"name": "half"}), "does not define: backend, as module:name, layouts"),
        (FineSpec(), "not a subclass"),
        (dict, "not a subclass"),
    ],
)
def test_malformed_declarations_are_refused(spec, reason):
    registry = load([source("odd", offering(spec)), source("ok", offering(variant(name="ok")))])
    assert sorted(registry.backends) == ["ok"]
    assert reason in registry.plugins[0].reason


def test_options_without_a_default_are_refused():
    @dataclass
    class Needs:
        level: int

    registry = load([source("odd", offering(variant(name="odd", Config=Needs)))])
    assert "level has no default" in registry.plugins[0].reason


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (module(kvcore_nonsense=lambda: ()), "no hook called kvcore_nonsense"),
        (module(kvcore_backends=lambda surprise: ()), "hooks do not fit"),
        (module(kvcore_backends=lambda: FineSpec), "not a sequence"),
        (module(kvcore_options=lambda: 3), "not a dataclass"),
    ],
)
def test_hooks_that_do_not_fit_are_refused(plugin, reason):
    assert reason in load([source("odd", plugin)]).plugins[0].reason


def plugin_on_disk(tmp_path, monkeypatch, name, spec_source):
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "spec.py").write_text(textwrap.dedent(spec_source))
    (package / "plugin.py").write_text(
        "from kvcore.registry.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def kvcore_backends():\n"
        f"    from {name}.spec import BACKENDS\n"
        "    return BACKENDS\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def give():
        return __import__(f"{name}.plugin", fromlist=["plugin"])

    return PluginSource(name, name, "1", give)


def test_a_declaration_that_loads_a_library_anew_is_refused(tmp_path, monkeypatch):
    """The first check: the library appears in sys.modules (a stand-in here)."""
    (tmp_path / "flash_attn.py").write_text("")
    hidden = "import importlib\nimportlib.import_module('flash_attn')\nBACKENDS = []"
    try:
        (record,) = load([plugin_on_disk(tmp_path, monkeypatch, "heavy_new", hidden)]).plugins
    finally:
        sys.modules.pop("flash_attn", None)
    assert "imports flash_attn" in record.reason


@pytest.mark.parametrize(
    "heavy",
    [
        "import torch",
        "from torch.nn import Module",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "from kvcore.attention.backend import AttentionBackend",
        "from kvcore import AttentionBackend",
        "from .helper import x",
    ],
)
def test_a_declaration_that_imports_torch_is_refused_when_torch_is_loaded(tmp_path, monkeypatch, heavy):
    import torch  # noqa: F401

    name = f"heavy_{abs(hash(heavy))}"
    made = plugin_on_disk(tmp_path, monkeypatch, name, f"{heavy}\nBACKENDS = []")
    (tmp_path / name / "helper.py").write_text("import torch.nn.functional as x\n")
    (record,) = load([made]).plugins
    assert "imports torch" in (record.reason or "")


def test_imports_that_run_later_or_never_are_allowed(tmp_path, monkeypatch):
    import torch  # noqa: F401

    light = """
        from typing import TYPE_CHECKING
        from kvcore.attention.declaration import BackendSpec
        if TYPE_CHECKING:
            import torch
        def create():
            import torch
        BACKENDS = []
    """
    made = plugin_on_disk(tmp_path, monkeypatch, "light_plugin", light)
    assert load([made]).plugins[0].reason is None


def test_contents_of_the_core_cannot_be_replaced():
    fake = type("Fake", (), {"kind": "kv"})
    new = type("New", (), {"kind": "kv2"})
    registry = load([source("c", module(kvcore_contents=lambda: [fake, new]))])
    assert registry.contents["kv2"] is new
    assert registry.contents["kv"] is not fake
    assert "belongs to the core" in registry.plugins[0].reason


def test_observers_that_raise_are_left_out_and_the_others_go_on(caplog):
    seen = []

    def bad(stats):
        raise KeyError("oops")

    registry = load(
        [
            source("bad", module(kvcore_step_finished=bad)),
            source("good", module(kvcore_step_finished=lambda stats: seen.append(stats["step"]))),
        ]
    )
    registry.step_finished({"step": 0})
    registry.step_finished({"step": 1})
    assert seen == [0, 1]
    assert "KeyError" in registry.plugins[0].reason
    assert caplog.text.count("left out") == 1


def test_the_choosing_hook_decides_among_candidates_only():
    def choose(kind, candidates):
        return {"full": "b", "window": "nobody"}.get(kind)

    registry = load([source("decider", module(kvcore_choose_backend=choose))])
    assert registry.choose("full", ["a", "b"], CPU) == "b"
    assert registry.choose("chunk", ["a", "b"], CPU) is None
    assert registry.choose("window", ["a", "b"], CPU) is None
    assert "returned 'nobody'" in registry.plugins[0].reason
    assert registry.choose("full", ["a", "b"], CPU) is None


def test_a_plugin_gets_its_own_options_and_its_errors_are_typed():
    @dataclass
    class Options:
        level: int = 1

    got = []

    def configure(options):
        if options.level > 2:
            raise ValueError("too high")
        got.append(options.level)

    registry = load([source("my-plugin", module(kvcore_options=lambda: Options, kvcore_configure=configure))])
    assert registry.options == {"my_plugin": Options}
    registry.configure({"my_plugin": Options(2)})
    assert got == [2]
    with pytest.raises(PluginError, match="too high"):
        registry.configure({"my_plugin": Options(3)})


def test_without_our_entry_point_our_backend_is_gone():
    """Our backends have no way in but the entry points of the installed distribution."""
    ours = [s for s in installed_sources() if s.distribution == "kvcore"]
    assert {p.name for p in distribution("kvcore").entry_points if p.group == "kvcore"} == {s.name for s in ours}
    assert "torch" in load(ours).backends
    without = load([s for s in ours if s.name != "torch"])
    assert "torch" not in without.backends
    with pytest.raises(UnknownBackendError):
        without.backend("torch")


def test_config_errors_of_a_plugin_pass_unchanged():
    @dataclass
    class Options:
        pass

    def configure(options):
        raise ConfigError("no such folder", field="plugins.p.path")

    registry = load([source("p", module(kvcore_options=lambda: Options, kvcore_configure=configure))])
    with pytest.raises(ConfigError, match="no such folder"):
        registry.configure({"p": Options()})
