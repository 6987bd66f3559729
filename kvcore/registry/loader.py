"""Finds plugins, loads them one by one, and survives whatever they do.

A plugin that fails is recorded with its distribution and reason. It is never fatal, and named when it is
asked for. Loading imports neither torch nor a kernel library; a plugin that does is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pluggy

from kvcore.attention.declaration import BackendSpec
from kvcore.manage.policies.eviction import BUILT_IN as EVICTION_POLICIES
from kvcore.registry import declarations
from kvcore.registry.claims import Claim, settle
from kvcore.registry.purity import loaded_heavy, static_heavy
from kvcore.registry.records import PluginRecord, PluginSource, installed_sources
from kvcore.registry.registry import Registry, option_node, told
from kvcore.spec.content import KVHeads, Latent, State
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Window

# Names of the core itself: no plugin replaces them.
CONTENTS = {c.kind: c for c in (KVHeads, Latent, State)}
RETENTIONS = {r.kind: r for r in (Full, Window, Chunk, Latest, Encoder)}


@cache
def installed() -> Registry:
    """The registry of the installed plugins; made once a process."""
    return load(installed_sources())


def load(sources: Iterable[PluginSource]) -> Registry:
    """Load plugins into a new registry: the core's own first, then in the order given."""
    registry = Registry()
    found = _Found()
    for source in sorted(sources, key=lambda source: not source.built_in):
        record = PluginRecord(source.name, source.distribution, source.version)
        registry.plugins.append(record)
        try:
            _load_one(source, record, registry, found)
        except _Refused as refusal:
            record.fail(str(refusal))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a plugin may even call sys.exit
            record.fail(f"it cannot be loaded: {told(error)}")
    found.settle(registry)
    return registry


class _Refused(Exception):
    """A plugin that is refused as a whole; the text says why."""


class _Found:
    """What all plugins declared, before duplicates are sorted out."""

    def __init__(self) -> None:
        self.backends: list[Claim] = []
        self.adapters: list[Claim] = []
        self.options: list[Claim] = []
        self.tables: dict[str, list[Claim]] = {"contents": [], "retentions": [], "eviction_policies": []}

    def settle(self, registry: Registry) -> None:
        """Move what nobody else may claim into the registry."""
        # What a built-in would have offered is not known when it fails to load; its own name stays its own.
        broken = [r.name for r in registry.plugins if r.built_in and r.broken]
        kept, refused = settle(self.backends, "backend", reserved=broken)
        registry.backends = {c.name: c.value for c in kept}
        registry.origins = {c.name: c.record for c in kept}
        registry.refused = {
            name: why for name, why in {**registry.refused, **refused}.items() if name not in registry.backends
        }
        registry.contents.update(CONTENTS)
        registry.retentions.update(RETENTIONS)
        core: dict[str, dict[str, Any]] = {
            "contents": CONTENTS,
            "retentions": RETENTIONS,
            "eviction_policies": EVICTION_POLICIES,
        }
        for table, claims in self.tables.items():
            kept, _ = settle(claims, _SINGULAR[table], reserved=core[table])
            getattr(registry, table).update({c.name: c.value for c in kept})
        kept, _ = settle(self.adapters, "model type")
        for claim in self.adapters:
            # An adapter that lost one of its types is left out as a whole.
            if claim.value not in registry.adapter_origins and all(
                c in kept for c in self.adapters if c.value is claim.value
            ):
                registry.model_adapters.append(claim.value)
                registry.adapter_origins[claim.value] = claim.record
        kept, _ = settle(self.options, "options node", reserved=broken)
        for claim in kept:
            registry.options[claim.name], registry.option_owners[claim.name] = claim.value


def _load_one(source: PluginSource, record: PluginRecord, registry: Registry, found: _Found) -> None:
    before, modules = loaded_heavy(), set(sys.modules)
    plugin = source.load()
    manager = registry.manager
    try:
        manager.register(plugin, record.id)
    except (ValueError, pluggy.PluginValidationError) as error:
        raise _Refused(f"its hooks do not fit: {told(error)}") from error
    try:
        _check_hooks(manager, plugin)
        declared = {hook: _declared(registry, plugin, hook) for hook in _DECLARING}
        options = registry.alone("kvcore_options", plugin)
        _check_purity(before, modules, plugin, declared)
        options = _checked_options(options)
    except BaseException:
        manager.unregister(plugin)
        raise
    for hook, classes in declared.items():
        for value in classes:
            _DECLARING[hook](value, record, registry, found)
    if options is not None:
        node = option_node(source.name)
        found.options.append(Claim(node, (options, plugin), record))
        record.provides.append(f"options plugins.{node}")
    for caller in manager.get_hookcallers(plugin) or ():
        if caller.name in ("kvcore_choose_backend", "kvcore_step_finished"):
            record.provides.append(f"hook {caller.name}")


def _check_hooks(manager: pluggy.PluginManager, plugin: Any) -> None:
    unknown = [c.name for c in manager.get_hookcallers(plugin) or () if not c.has_spec()]
    if unknown:
        raise _Refused(f"this core has no hook called {', '.join(sorted(unknown))}")


def _declared(registry: Registry, plugin: Any, hook: str) -> list[Any]:
    try:
        answers = registry.alone(hook, plugin)
    except Exception as error:
        raise _Refused(f"{hook} raised {told(error)}") from error
    classes: list[Any] = []
    for answer in answers:
        if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
            raise _Refused(f"{hook} returned {answer!r}, not a sequence of classes")
        classes += answer
    return classes


def _check_purity(before: set[str], modules_before: set[str], plugin: Any, declared: dict[str, list[Any]]) -> None:
    new = sorted(loaded_heavy() - before)
    problem = f"loading its declaration imports {', '.join(new)}" if new else None
    if problem is None and before:
        own = [getattr(plugin, "__name__", "")]
        own += [c.__module__ for classes in declared.values() for c in classes if isinstance(c, type)]
        problem = static_heavy([m for m in own if m], set(sys.modules) - modules_before)
    if problem:
        raise _Refused(f"{problem}; declarations must import neither torch nor a kernel library")


def _checked_options(answers: list[Any]) -> type[Any] | None:
    if not answers:
        return None
    problem = declarations.options_problem(answers[0])
    if problem:
        raise _Refused(f"kvcore_options: {problem}")
    return answers[0]  # type: ignore[no-any-return]


def _take_backend(value: type[BackendSpec], record: PluginRecord, registry: Registry, found: _Found) -> None:
    problem = declarations.backend_problem(value)
    name = declarations.shown_name(value)
    record.provides.append(f"backend {name}")
    if problem:
        registry.refused[name] = f"{problem} (plugin {record.name}, {record.origin})"
        record.fail(problem)
    else:
        found.backends.append(Claim(name, value, record))


def _take_adapter(value: Any, record: PluginRecord, registry: Registry, found: _Found) -> None:
    kinds = getattr(value, "model_types", None)
    if not isinstance(kinds, tuple) or not callable(getattr(value, "facts", None)):
        record.fail(f"model adapter {value!r} lacks model_types or facts")
        return
    found.adapters += [Claim(kind, value, record) for kind in kinds]
    record.provides += [f"model {kind}" for kind in kinds]


def _take(table: str, attribute: str) -> Callable[..., None]:
    what = _SINGULAR[table]

    def take(value: Any, record: PluginRecord, registry: Registry, found: _Found) -> None:
        name = getattr(value, attribute, None)
        if not isinstance(value, type) or not isinstance(name, str) or name in ("", "auto"):
            record.fail(f"{what} {value!r} has no {attribute} to be chosen by")
            return
        found.tables[table].append(Claim(name, value, record))
        record.provides.append(f"{what} {name}")

    return take


_SINGULAR = {"contents": "content", "retentions": "retention", "eviction_policies": "eviction policy"}
_DECLARING: dict[str, Callable[..., None]] = {
    "kvcore_backends": _take_backend,
    "kvcore_contents": _take("contents", "kind"),
    "kvcore_retentions": _take("retentions", "kind"),
    "kvcore_model_adapters": _take_adapter,
    "kvcore_eviction_policies": _take("eviction_policies", "name"),
}
