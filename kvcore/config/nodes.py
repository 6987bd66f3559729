"""The typed root node that Hydra composes into: our schema, plus a node for each backend and plugin."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from omegaconf import DictConfig, ListConfig, OmegaConf

from kvcore.config.schema import KVCoreConfig
from kvcore.registry.registry import Registry

_MADE: WeakKeyDictionary[Registry, DictConfig] = WeakKeyDictionary()


def root_node(registry: Registry) -> DictConfig:
    """The root node of a registry; made once, and never changed: Hydra's store copies it."""
    if registry not in _MADE:
        _MADE[registry] = _root_node(registry)
    return _MADE[registry]


def _root_node(registry: Registry) -> DictConfig:
    """The schema with ``backends.<name>`` and ``plugins.<name>`` for whatever is installed.

    A dataclass that OmegaConf cannot take as a node puts its backend out of service, with the reason.
    """
    root = _node(KVCoreConfig)
    OmegaConf.set_struct(root.model.geometry, False)  # any field that a config.json may have
    for name, spec in sorted(registry.backends.items()):
        try:
            root.backends[name] = _node(spec.Config)
        except Exception as error:
            registry.refuse(name, f"backend {name}: its Config cannot be a typed node: {_first_line(error)}")
    for name, config in sorted(registry.options.items()):
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
