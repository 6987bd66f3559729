"""Bounds and choices of the schema, and features that are named but not built yet. No Hydra here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from kvcore.config.schema import KVCoreConfig
from kvcore.config.units import parse_bytes
from kvcore.errors import ConfigError, NotBuiltError
from kvcore.registry.registry import Registry


def validate(config: KVCoreConfig, registry: Registry) -> None:
    """Check every value.

    Raises:
        ConfigError: A value is outside its bounds or choices.
        NotBuiltError: A key asks for what is not built yet.
        BackendError, PluginError: A backend that was named is not installed, or broken.
    """
    for path, given, meta in _values(config, ""):
        _check(path, given, meta)
    for path, asked, allowed, remedy in NOT_BUILT:
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        if asked(value):
            raise NotBuiltError(f"{path} is not built yet", field=path, got=value, allowed=allowed, remedy=remedy)
    if config.cache.memory is not None and config.cache.num_blocks is not None:
        raise ConfigError(
            "the size of the cache is given twice",
            field="cache.num_blocks",
            got=config.cache.num_blocks,
            allowed="either cache.memory or cache.num_blocks",
        )
    if config.sampling.n > config.engine.max_num_seqs:
        raise ConfigError(
            "sampling.n is out of range",
            field="sampling.n",
            got=config.sampling.n,
            allowed=f"1 to {config.engine.max_num_seqs} (engine.max_num_seqs)",
        )
    kinds = {
        f"backend_by_kind.{f.name}": getattr(config.backend_by_kind, f.name) for f in fields(config.backend_by_kind)
    }
    for key, name in {"backend": config.backend, **kinds}.items():
        if name != "auto":
            registry.backend(name, key=key)


def _values(node: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for f in fields(node):
        value, path = getattr(node, f.name), f"{prefix}{f.name}"
        if is_dataclass(value):
            yield from _values(value, f"{path}.")
        else:
            yield path, value, f.metadata


# Of whole numbers without a bound of their own: products of several of them stay numbers that can be printed.
MOST = 2**40


def _check(path: str, value: Any, meta: Any) -> None:
    choices, least, most = meta.get("choices"), meta.get("least"), meta.get("most")
    if value is None:
        return
    # `chat=true` arrives as the text "True".
    shown = value.lower() if path == "chat" else value
    if choices and shown not in choices:
        raise ConfigError(f"{path} does not take this value", field=path, got=value, allowed=choices)
    if isinstance(value, int) and not isinstance(value, bool):
        most = MOST if most is None else most
    too_small = least is not None and not value >= least  # NaN is too small as well
    if too_small or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"{least} to {most}"
        raise ConfigError(f"{path} is out of range", field=path, got=value, allowed=bounds)


def _more_than_one(value: int) -> bool:
    return value > 1


# key, when it asks for something that does not exist yet, what is allowed, what to do
NOT_BUILT: tuple[tuple[str, Callable[[Any], bool], Any, str], ...] = (
    ("parallel.tensor", _more_than_one, 1, "use one rank"),
    ("parallel.pipeline", _more_than_one, 1, "use one rank"),
    ("parallel.decode_context", _more_than_one, 1, "use one rank"),
    ("executor", lambda v: v != "inline", "inline", "use executor=inline"),
    (
        "cache.swap_memory",
        lambda v: parse_bytes("cache.swap_memory", v) > 0,
        0,
        "leave it at 0: a preempted request is computed again",
    ),
    ("cache.explain", bool, False, "leave it out"),
    ("cache.explain_history", lambda v: v is not None, None, "leave it out"),
    ("cache.scale_file", lambda v: v is not None, None, "leave it out: tensor and head scales are 1.0"),
    ("plan.accounting", lambda v: v is not None, None, "leave it out: kvcore's own accounting is exact"),
    ("plan.accounting_version", lambda v: v is not None, None, "leave it out"),
    ("format", lambda v: v != "text", "text", "use format=text, or output=json for the data"),
)
