"""`Registry`: everything that the installed plugins bring, and what is wrong with the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import KVCoreError, PluginError, UnknownBackendError
from kvcore.registry.hookspecs import PROJECT, HookSpecs
from kvcore.registry.records import PluginRecord
from kvcore.spec.content import Content
from kvcore.spec.retention import Retention

if TYPE_CHECKING:
    from kvcore.manage.watch.events import Event

log = logging.getLogger(PROJECT)


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows our hooks and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    return manager


@dataclass(eq=False)  # two registries are never equal, and each has its own typed node
class Registry:
    """What plugins bring. Make one with `kvcore.registry.loader`.

    Attributes:
        manager: pluggy's manager with every plugin that loaded.
        plugins: A record of every plugin found, broken ones included; keyed by entry point.
        backends: Declarations by name.
        refused: Backends that were declared but cannot be used, by name, with the reason.
        origins: The plugin of each backend, by backend name.
        contents, retentions, eviction_policies: Classes by the name they are chosen with.
        model_adapters: Subclasses of `ModelAdapter`.
        adapter_origins: The plugin of each of them.
        options: Dataclasses of plugins' own options, by node name under ``plugins``.
        option_owners: The plugin of each node of options.
    """

    manager: pluggy.PluginManager = field(default_factory=new_manager)
    plugins: list[PluginRecord] = field(default_factory=list)
    backends: dict[str, type[BackendSpec]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    origins: dict[str, PluginRecord] = field(default_factory=dict)
    contents: dict[str, type[Content]] = field(default_factory=dict)
    retentions: dict[str, type[Retention]] = field(default_factory=dict)
    eviction_policies: dict[str, type[Any]] = field(default_factory=dict)
    model_adapters: list[type[Any]] = field(default_factory=list)
    adapter_origins: dict[type[Any], PluginRecord] = field(default_factory=dict)
    options: dict[str, type[Any]] = field(default_factory=dict)
    option_owners: dict[str, Any] = field(default_factory=dict)

    def backend(self, name: str, *, key: str = "backend") -> type[BackendSpec]:
        """The declaration called `name`.

        Args:
            name: Name of the backend.
            key: The configuration key that asked, for messages.

        Raises:
            PluginError: A plugin declares it, but is broken, duplicated or speaks another version.
            UnknownBackendError: Nobody declares it; lists the installed ones and the broken plugins.
        """
        if name in self.backends:
            return self.backends[name]
        if name in self.refused:
            raise PluginError(
                f"backend {name} cannot be used: {self.refused[name]}",
                field=key,
                got=name,
                allowed=sorted(self.backends),
                remedy="repair or uninstall the plugin; `kvcore plugins` shows every plugin's state",
            )
        broken = [f"{r.name} ({r.origin}): {r.reason}" for r in self.plugins if r.broken]
        message = f"no installed plugin offers a backend called {name}"
        if broken:
            message += "; broken plugins: " + " | ".join(broken)
        raise UnknownBackendError(
            message,
            field=key,
            got=name,
            allowed=sorted(self.backends) or "none is installed",
            remedy="choose an installed backend, or install the plugin that brings it (see `kvcore plugins`)",
        )

    def refuse(self, name: str, reason: str) -> None:
        """Take a backend out of service, with the reason, and mark its plugin as broken."""
        self.backends.pop(name, None)
        self.refused[name] = reason
        if name in self.origins:
            self.origins[name].fail(reason)

    def refuse_options(self, node: str, reason: str) -> None:
        """Take the options of a plugin out of service, and mark the plugin as broken."""
        self.options.pop(node, None)
        self._record(self.option_owners.pop(node)).fail(reason)

    def refuse_adapter(self, adapter: type[Any], reason: str) -> None:
        """Take a model adapter out of service, mark its plugin as broken, and say so once."""
        self.model_adapters.remove(adapter)
        record = self.adapter_origins[adapter]
        record.fail(reason)
        log.warning(
            "model adapter %s of plugin %s (%s) is left out: %s", adapter.__name__, record.name, record.origin, reason
        )

    def configure(self, options: Mapping[str, Any]) -> None:
        """Hand each plugin its own options; see the hook `kvcore_configure`.

        Raises:
            KVCoreError: The plugin refuses the values; anything else that it raises is a `PluginError`.
        """
        for name, plugin in self.option_owners.items():
            if name not in options:
                continue
            try:
                self.alone("kvcore_configure", plugin, options=options[name])
            except KVCoreError:
                raise
            except Exception as error:
                raise PluginError(
                    f"the plugin behind plugins.{name} does not take its options: {told(error)}",
                    field=f"plugins.{name}",
                    got=options[name],
                ) from error

    def step_finished(self, stats: Mapping[str, float]) -> None:
        """Tell every observer about one step."""
        self._tell("kvcore_step_finished", stats=stats)

    def cache_changed(self, events: Sequence[Event]) -> None:
        """Tell every observer what became and ceased to be cached, if anything did."""
        if events:
            self._tell("kvcore_cache_events", events=events)

    def _tell(self, hook: str, **arguments: Any) -> None:
        """Call a hook of every observer; one that raises is reported, then left out."""
        for implementation in list(getattr(self.manager.hook, hook).get_hookimpls()):
            try:
                self.alone(hook, implementation.plugin, **arguments)
            except Exception as error:
                self._drop(implementation.plugin, f"{hook} raised {told(error)}")

    def choose(self, kind: str, candidates: Sequence[str], device: DeviceFacts) -> str | None:
        """The first answer of the hook `kvcore_choose_backend`, or None when all abstain."""
        # Later registrations are asked first, as pluggy does.
        for implementation in reversed(self.manager.hook.kvcore_choose_backend.get_hookimpls()):
            problem = None
            try:
                answer = self.alone(
                    "kvcore_choose_backend",
                    implementation.plugin,
                    kind=kind,
                    candidates=tuple(candidates),
                    device=device,
                )
            except Exception as error:
                problem = f"kvcore_choose_backend raised {told(error)}"
            else:
                if answer is None:
                    continue
                if answer in candidates:
                    return str(answer)
                problem = f"kvcore_choose_backend returned {answer!r}, not one of {', '.join(candidates)}"
            self._drop(implementation.plugin, problem)
        return None

    def alone(self, hook: str, plugin: Any, **arguments: Any) -> Any:
        """Call one hook of one plugin."""
        others = [p for p in self.manager.get_plugins() if p is not plugin]
        return self.manager.subset_hook_caller(hook, others)(**arguments)

    def _drop(self, plugin: Any, reason: str) -> None:
        record = self._record(plugin)
        self.manager.unregister(plugin)
        record.fail(reason)
        log.warning("plugin %s (%s) is left out from now on: %s", record.name, record.origin, reason)

    def _record(self, plugin: Any) -> PluginRecord:
        name = self.manager.get_name(plugin)
        return next(record for record in self.plugins if record.id == name)


def option_node(plugin: str) -> str:
    """The node under ``plugins`` of the options of an entry point."""
    return plugin.replace("-", "_")


def told(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
