"""The typed root node that Hydra composes into: our schema, plus a node for each backend and plugin."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

from omegaconf import DictConfig, ListConfig, OmegaConf

from kvcore.config.hydra_session import SCHEMA_NAME
from kvcore.config.schema import Root
from kvcore.registry.registry import Registry

# How Hydra logs, helps, launches and sweeps as an application, which it is not here: to read that takes a third of the
# time of a composition.
_UNUSED = ("env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output", "sweeper")

_MADE: WeakKeyDictionary[Registry, dict[type[Root], DictConfig]] = WeakKeyDictionary()


def root_node(registry: Registry, root: type[Root]) -> DictConfig:
    """The typed node of a root; made once, and never changed: Hydra's store copies it."""
    made = _MADE.setdefault(registry, {})
    if root not in made:
        made[root] = _root_node(registry, root)
    return made[root]


def defaults_list(registry: Registry, root: type[Root]) -> list[Any]:
    """The schema, then a preset for each node that has one, none for each backend, nor of those of Hydra itself."""
    chosen = [{f.name: f.metadata["preset"]} for f in fields(root) if f.metadata.get("preset")]
    backends = [{f"backends/{name}": None} for name in sorted(registry.backends)] if _has(root, "backends") else []
    return [SCHEMA_NAME, *chosen, *backends, *({f"override hydra/{name}": None} for name in _UNUSED), "_self_"]


def _has(root: type[Root], name: str) -> bool:
    return any(f.name == name for f in fields(root))


def _root_node(registry: Registry, kind: type[Root]) -> DictConfig:
    """The schema with ``backends.<name>`` and ``plugins.<name>`` for whatever is installed.

    A dataclass that OmegaConf cannot take as a node puts its backend out of service, with the reason.
    """
    root = _node(kind)
    if "model" in root and "geometry" in root.model:
        OmegaConf.set_struct(root.model.geometry, False)  # any field that a config.json may have
    for name, spec in sorted(registry.backends.items()) if _has(kind, "backends") else ():
        try:
            root.backends[name] = _node(spec.Config)
        except Exception as error:
            registry.refuse(name, f"backend {name}: its Config cannot be a typed node: {_first_line(error)}")
    for name, config in sorted(registry.options.items()) if _has(kind, "plugins") else ():
        try:
            root.plugins[name] = _node(config)
        except Exception as error:
            registry.refuse_options(name, f"plugins.{name} cannot be a typed node: {_first_line(error)}")
    return root


def _first_line(error: Exception) -> str:
    """What is wrong with a dataclass, without the names of the classes that found it."""
    return str(error).strip().partition("\n")[0]


def _node(config: type[Any]) -> DictConfig:
    node: DictConfig = OmegaConf.structured(config)
    _unlock(node)
    return node


def _unlock(node: DictConfig) -> None:
    """A frozen dataclass makes its node and all below read-only; the instance made from it is frozen all the same."""
    OmegaConf.set_readonly(node, None)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            _unlock(child)
        elif isinstance(child, ListConfig):
            OmegaConf.set_readonly(child, None)
