"""Nothing public without a word about it, no hook without a test: what is added later fails here first."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

from kvcore.attention.declaration import DeviceFacts
from kvcore.cli import help_text
from kvcore.cli.commands import NAMES, command
from kvcore.manage.policies.eviction import LRU
from kvcore.manage.watch.events import Removed
from kvcore.models.families import model_facts
from kvcore.models.families.decoder import FullAttention
from kvcore.registry.hookspecs import PROJECT, HookSpecs, hookimpl
from kvcore.registry.loader import installed, load
from kvcore.registry.records import PluginSource
from kvcore.registry.registry import Registry
from kvcore.settings.cache import CacheSettings
from kvcore.spec.content import KVHeads
from kvcore.spec.retention import Full

HOOKS = {n: f for n, f in vars(HookSpecs).items() if getattr(f, f"{PROJECT}_spec", None) is not None}


@pytest.fixture(scope="module")
def pages(repo: Path) -> ModuleType:
    """The generator of the reference."""
    path = repo / "docs" / "_ext" / "pages.py"
    spec = importlib.util.spec_from_file_location("docs_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- hooks


def test_every_hook_is_documented_with_its_arguments(repo: Path, pages: ModuleType) -> None:
    assert "_generated/hooks.md" in (repo / "docs" / "hooks.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", pages.hooks(repo / "docs"), re.M | re.S))
    assert set(sections) == set(HOOKS)
    for name, function in HOOKS.items():
        code, _, text = sections[name].strip().removeprefix("```python\n").partition("\n```")
        parameters = [p for p in inspect.signature(function).parameters if p != "self"]
        assert len(text.split()) >= 4, f"{name} says nothing"
        for parameter in parameters:
            assert re.search(rf"\b{parameter}\b", code), f"{name} shows no argument {parameter}"
            assert re.search(rf"\b{parameter}\b", text), f"{name} does not explain {parameter}"


@dataclass(frozen=True)
class Options:
    level: int = 3


class Pebble(KVHeads):
    kind = "pebble"


class Forever(Full):
    kind = "forever"


class Oldest(LRU):
    name = "oldest"


class Adapter(FullAttention):
    model_types = ("pebble_model",)


def plugged(**hooks: Callable[..., Any]) -> Registry:
    """A registry with one plugin that implements these hooks."""
    module = ModuleType("guarded_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    registry = load([PluginSource("guarded", "guarded", "1.0", lambda: module)])
    assert not [p.reason for p in registry.plugins if p.broken]
    return registry


def backends() -> None:
    spec = installed().backends["torch"]
    assert plugged(kvcore_backends=lambda: (spec,)).backends == {"torch": spec}


def contents() -> None:
    assert plugged(kvcore_contents=lambda: (Pebble,)).contents["pebble"] is Pebble


def retentions() -> None:
    assert plugged(kvcore_retentions=lambda: (Forever,)).retentions["forever"] is Forever


def model_adapters() -> None:
    registry = plugged(kvcore_model_adapters=lambda: (Adapter,))
    config = {"model_type": "pebble_model", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    facts = model_facts(config, cache=CacheSettings(), adapters=tuple(registry.model_adapters))
    assert len(facts.owned) == 2


def eviction_policies() -> None:
    assert plugged(kvcore_eviction_policies=lambda: (Oldest,)).eviction_policies == {"oldest": Oldest}


def options_and_configure() -> None:
    got: list[Any] = []
    registry = plugged(kvcore_options=lambda: Options, kvcore_configure=lambda options: got.append(options))
    assert registry.options == {"guarded": Options}
    registry.configure({"guarded": Options(5)})
    assert got == [Options(5)]


def choose_backend() -> None:
    asked: list[Any] = []

    def choose(kind: str, candidates: Any, device: DeviceFacts) -> str:
        asked.append((kind, tuple(candidates), device.kind))
        return str(candidates[-1])

    registry = plugged(kvcore_choose_backend=choose)
    assert registry.choose("full", ["a", "b"], DeviceFacts("cpu")) == "b"
    assert asked == [("full", ("a", "b"), "cpu")]


def step_finished() -> None:
    seen: list[Any] = []
    registry = plugged(kvcore_step_finished=lambda stats: seen.append(dict(stats)))
    registry.step_finished({"step": 1.0})
    assert seen == [{"step": 1.0}]


def cache_events() -> None:
    seen: list[Any] = []
    registry = plugged(kvcore_cache_events=lambda events: seen.extend(events))
    gone = Removed(0, b"digest", 7)
    registry.cache_changed([gone])
    assert seen == [gone]


EFFECTS: dict[str, Callable[[], None]] = {
    "kvcore_backends": backends,
    "kvcore_contents": contents,
    "kvcore_retentions": retentions,
    "kvcore_model_adapters": model_adapters,
    "kvcore_eviction_policies": eviction_policies,
    "kvcore_options": options_and_configure,
    "kvcore_configure": options_and_configure,
    "kvcore_choose_backend": choose_backend,
    "kvcore_step_finished": step_finished,
    "kvcore_cache_events": cache_events,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_an_effect(hook: str) -> None:
    EFFECTS[hook]()


def test_every_hook_is_used_by_a_test_of_its_own_room(repo: Path) -> None:
    """Beyond the wiring above: some test, or the example of the docs, implements it in earnest."""
    places = [p for folder in ("tests", "docs/examples", "plugins") for p in (repo / folder).rglob("*.py")]
    text = "\n".join(p.read_text() for p in places if p.name != Path(__file__).name)
    unused = [name for name in HOOKS if not re.search(rf"\b{name}\b", text)]
    assert not unused


# ---- options


def schema_keys(node: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the schema, walked here on its own: the guard must not share the code that it guards."""
    hints = get_type_hints(node)
    for f in fields(node):
        if is_dataclass(hints[f.name]):
            yield from schema_keys(hints[f.name], f"{prefix}{f.name}.")
        elif f.name not in ("backends", "plugins"):
            yield prefix + f.name, f


def public_keys() -> dict[str, str]:
    """Key and help of everything that may be set by hand in some command."""
    roots = [command(name).root for name in NAMES]
    found = {k: str(f.metadata.get("help", "")) for root in roots for k, f in schema_keys(root)}
    del found["device.preset"]  # a file of presets says its own name
    for node, configs in (
        ("backends", {n: s.Config for n, s in installed().backends.items()}),
        ("plugins", installed().options),
    ):
        for name, config in configs.items():
            found |= {f"{node}.{name}.{f.name}": "" for f in fields(config)}
    return found


def test_every_public_option_is_in_the_reference(repo: Path, pages: ModuleType) -> None:
    assert "_generated/keys.md" in (repo / "docs" / "reference.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|[^|]+\|[^|]*\|(.*)\|$", pages.keys(repo / "docs"), re.M)
    meanings = {key: meaning.strip() for key, meaning in rows}
    keys = public_keys()
    assert len(keys) > 50
    assert set(meanings) == set(keys)
    silent = [key for key, meaning in meanings.items() if len(meaning.split()) < 2]
    assert not silent


def test_every_public_option_is_in_the_help_of_some_command() -> None:
    shown = "\n".join(help_text.command(command(name), installed()) for name in NAMES)
    listed = set(re.findall(r"^  ([a-z_0-9.]+): ", shown, re.M))
    assert set(public_keys()) <= listed


def test_every_command_is_in_the_reference(repo: Path, pages: ModuleType) -> None:
    assert "_generated/commands.md" in (repo / "docs" / "reference.md").read_text()
    table = pages.commands(repo / "docs")
    assert [c for c in NAMES if f"`kvcore {c}`" not in table] == []
