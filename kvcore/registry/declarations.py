"""Is a declaration well formed? Asked once when a plugin is loaded, so that nothing fails later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import isabstract, isclass

from kvcore.attention.declaration import API_VERSION, BackendSpec

NAME = re.compile(r"[a-z][a-z0-9_]*")


def backend_problem(declared: object) -> str | None:
    """Why a class is no usable `BackendSpec`, or None."""
    if not isclass(declared) or not issubclass(declared, BackendSpec):
        return f"{declared!r} is not a subclass of kvcore.BackendSpec"
    version = getattr(declared, "api_version", None)
    if version != API_VERSION:
        shown = shown_name(declared)
        return f"backend {shown} speaks contract version {version}, this core speaks {API_VERSION}"
    name = getattr(declared, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "auto":
        return f"backend name {name!r} must be lower case: a letter, then letters, digits or _, and not 'auto'"
    missing = {*declared.__abstractmethods__} if isabstract(declared) else set()
    if declared.create.__func__ is BackendSpec.create.__func__ and ":" not in declared.backend:  # type: ignore[attr-defined]
        missing.add("backend, as module:name")
    if missing:
        return f"backend {name} does not define: {', '.join(sorted(missing))}"
    ranks = declared.priority
    if not isinstance(ranks, Mapping) or not all(isinstance(rank, int) for rank in ranks.values()):
        return f"backend {name}: priority is {ranks!r}, allowed: a whole number for each device class"
    if declared.max_offset_bits not in (31, 63):
        return f"backend {name}: max_offset_bits is {declared.max_offset_bits!r}, allowed: 31 or 63"
    problem = options_problem(declared.Config)
    return f"backend {name}: Config {problem}" if problem else None


def options_problem(config: object) -> str | None:
    """Why a class cannot be a node of typed options, or None."""
    if not isclass(config) or not is_dataclass(config):
        return f"{config!r} is not a dataclass"
    for f in fields(config):
        if f.init and f.default is MISSING and f.default_factory is MISSING:
            return f"field {f.name} has no default"
    return None


def shown_name(declared: object) -> str:
    """The name of a declaration, however malformed."""
    return str(getattr(declared, "name", declared))
