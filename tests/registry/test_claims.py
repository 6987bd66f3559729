"""A name of kvcore's own stays with kvcore; between strangers nobody wins; and `auto` says what it went without."""

import json
from dataclasses import dataclass
from types import ModuleType

import pytest

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.cli import main
from kvcore.errors import PluginError
from kvcore.registry import loader
from kvcore.registry.hookspecs import hookimpl
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource, installed_sources

BUILT_IN = [s for s in installed_sources() if s.distribution == "kvcore"]


class Claims(BackendSpec):
    """A stranger's backend that would serve everything, and goes first."""

    name = "torch"
    priority = {"cpu": 1000, "cuda": 1000}

    @classmethod
    def unavailable(cls, options):
        return None

    @classmethod
    def unsupported_device(cls, facts, options):
        return None

    @classmethod
    def unsupported(cls, query, options):
        return None

    @classmethod
    def layouts(cls, spec, facts, options):
        from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd

        return [LayoutOption(hnd(spec.content), KernelBlocks(multiple_of=1))]

    @classmethod
    def create(cls, device, options):
        raise AssertionError("never in these tests")


class Raises(Claims):
    name = "acme"

    @classmethod
    def unsupported(cls, query, options):
        raise OSError("no such kernel")


def module(**hooks):
    made = ModuleType("stranger")
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))
    return made


def stranger(entry="evil", dist="evil", **hooks):
    plugin = module(**hooks)
    return PluginSource(entry, dist, "6.6", lambda: plugin)


def broken(entry, dist="kvcore"):
    def fail():
        raise ImportError("libgone.so")

    return PluginSource(entry, dist, "1", fail)


def of(registry, dist):
    return next(r for r in registry.plugins if r.distribution == dist)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["torch", "triton", "flash_attn", "flashinfer", "vllm_cpu"])
def test_a_stranger_that_claims_a_backend_of_ours_is_left_out_and_named(name, first):
    claim = type("Claim", (Claims,), {"name": name})
    mine = type("Mine", (Claims,), {"name": "mine"})
    evil = stranger(kvcore_backends=lambda: [claim, mine])
    registry = load([evil, *BUILT_IN] if first else [*BUILT_IN, evil])
    assert registry.backends[name].__module__.startswith("kvcore_")
    assert registry.backends["mine"] is mine
    assert f"backend {name} belongs to the core" in of(registry, "evil").reason
    assert of(registry, "kvcore").reason is None
    assert registry.refused == {}


@pytest.mark.parametrize("malformed", [{"api_version": 99}, {"max_offset_bits": 7}, {"priority": 5}, {"Config": int}])
def test_a_malformed_claim_of_a_name_of_ours_changes_nothing_but_its_own_state(malformed):
    claim = type("Claim", (Claims,), malformed)
    registry = load([stranger(kvcore_backends=lambda: [claim]), *BUILT_IN])
    assert registry.backend("torch").__module__ == "kvcore_torch.declaration"
    assert registry.refused == {}
    assert of(registry, "evil").broken


def test_an_entry_point_called_as_ours_and_our_own_module_offered_by_a_stranger():
    ours = next(s for s in BUILT_IN if s.name == "torch")
    mine = type("Mine", (Claims,), {"name": "mine"})
    same_name = stranger("torch", "evil", kvcore_backends=lambda: [mine])
    registry = load([PluginSource("aaa", "thief", "1", ours.load), same_name, *BUILT_IN])
    assert registry.backend("torch").__module__ == "kvcore_torch.declaration"
    assert registry.origins["torch"].distribution == "kvcore"
    assert registry.backends["mine"] is mine
    assert of(registry, "thief").broken
    assert not of(registry, "evil").broken


def test_options_of_a_plugin_of_ours_stay_ours_and_strangers_lose_both():
    @dataclass
    class Options:
        level: int = 1

    registry = load([stranger("metrics", "evil", kvcore_options=lambda: Options), *BUILT_IN])
    assert registry.options["metrics"] is not Options
    assert "options node metrics belongs to the core" in of(registry, "evil").reason
    two = load([stranger("watch", d, kvcore_options=lambda: Options) for d in ("acme", "other")])
    assert two.options == {}
    assert all("acme 6.6 and by other 6.6" in r.reason for r in two.plugins)


@pytest.mark.parametrize(
    ("hook", "attribute", "name", "table"),
    [
        ("kvcore_contents", "kind", "latent", "contents"),
        ("kvcore_retentions", "kind", "window", "retentions"),
        ("kvcore_eviction_policies", "name", "lru", "eviction_policies"),
    ],
)
def test_other_names_of_the_core_cannot_be_taken_and_auto_is_no_name(hook, attribute, name, table):
    claim, auto = (type("Claim", (), {attribute: n}) for n in (name, "auto"))
    registry = load([stranger(**{hook: lambda: [claim, auto]})])
    assert claim not in getattr(registry, table).values()
    assert "auto" not in getattr(registry, table)
    assert f"{name} belongs to the core" in registry.plugins[0].reason
    twice = load([stranger("a", d, **{hook: lambda: [type("C", (), {attribute: "new"})]}) for d in ("acme", "other")])
    assert "new" not in getattr(twice, table)
    assert all("declared twice, by acme 6.6 and by other 6.6" in r.reason for r in twice.plugins)


def test_two_adapters_of_one_model_type_are_both_left_out():
    class One:
        model_types = ("thing", "only_one")

        def facts(self):
            return None

    class Two(One):
        model_types = ("thing",)

    class Three(One):
        model_types = ("other",)

    sources = [
        stranger("m", d, kvcore_model_adapters=lambda c=c: [c]) for d, c in (("a", One), ("b", Two), ("c", Three))
    ]
    registry = load(sources)
    assert registry.model_adapters == [Three]
    assert [r.broken for r in registry.plugins] == [True, True, False]


def test_a_built_in_that_cannot_be_loaded_keeps_its_name():
    registry = load([broken("torch"), stranger(kvcore_backends=lambda: [Claims])])
    assert registry.backends == {}
    with pytest.raises(PluginError, match="belongs to the core"):
        registry.backend("torch")


@pytest.mark.parametrize(
    ("sources", "name", "reason"),
    [
        ([stranger("x", "acme", kvcore_backends=lambda: [Raises])], "acme", "no such kernel"),
        (
            [stranger("x", d, kvcore_backends=lambda: [type("C", (Claims,), {"name": "acme"})]) for d in ("a1", "a2")],
            "acme",
            "a1 6.6 and by a2 6.6",
        ),
        ([broken("gpu", "acme-gpu")], "gpu", "libgone.so"),
    ],
)
def test_auto_says_what_it_went_without_and_what_it_took(sources, name, reason, monkeypatch, capsys):
    monkeypatch.setattr(loader, "installed", lambda: load([*BUILT_IN, *sources]))
    for command in ("plan", "backends"):
        assert main([command, "device=cpu", "output=json"]) == 0
        document = json.loads(capsys.readouterr().out)
        (row,) = document["passed_over"]
        assert (row["kind"], row["chosen"], row["name"]) == ("full", "torch", name)
        assert reason in row["reason"]
        assert main([command, "device=cpu"]) == 0
        text = capsys.readouterr().out
        assert f"backend=auto takes torch for the full caches without {name}, which is broken" in text
        # Whoever is asked for by name goes without nothing.
        assert main([command, "device=cpu", "backend=torch", "output=json"]) == 0
        assert json.loads(capsys.readouterr().out)["passed_over"] == []


def test_a_broken_backend_that_would_go_last_is_no_news(monkeypatch, capsys):
    last = type("Last", (Raises,), {"priority": {"cpu": -1}})
    monkeypatch.setattr(loader, "installed", lambda: load([*BUILT_IN, stranger(kvcore_backends=lambda: [last])]))
    assert main(["plan", "device=cpu", "cache.memory=1GiB", "output=json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed_over"] == []
    assert DeviceFacts("cpu").kind in last.priority
