"""The typed root node that Hydra composes into: our schema, plus a node for each backend and plugin."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcore.config.schema import KVCoreConfig
from kvcore.registry.registry import Registry, told


def root_node(registry: Registry) -> DictConfig:
    """The schema with ``backends.<name>`` and ``plugins.<name>`` for whatever is installed.

    A dataclass that OmegaConf cannot take as a node puts its backend out of service, with the reason.
    """
    root: DictConfig = OmegaConf.structured(KVCoreConfig)
    for name, spec in sorted(registry.backends.items()):
        try:
            root.backends[name] = _node(spec.Config)
        except Exception as error:
            registry.refuse(name, f"backend {name}: its Config cannot be a typed node: {told(error)}")
    for name, config in sorted(registry.options.items()):
        try:
            root.plugins[name] = _node(config)
        except Exception as error:
            registry.refuse_options(name, f"plugins.{name} cannot be a typed node: {told(error)}")
    return root


def _node(config: type[Any]) -> DictConfig:
    node: DictConfig = OmegaConf.structured(config)
    # A frozen dataclass makes its node read-only; the instance is frozen all the same.
    OmegaConf.set_readonly(node, None)
    return node
