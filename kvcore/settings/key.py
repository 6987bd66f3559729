"""`key` makes the field of a setting with its help and bounds; `check` is the only place where those are enforced."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any

from kvcore.errors import ConfigError, KVCoreError

# Of whole numbers without a bound of their own: products of several of them stay numbers that can be printed.
MOST = 2**40


def key(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Any:
    """A field with its help, its choices and its bounds: at least, at most, greater than."""
    metadata = {"help": help, "choices": choices, "least": least, "most": most, "above": above}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# By the annotation as it is written: the types that a value may have, and how people call them.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "Length": ((int, type(None)), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a text"),
    "int | str": ((int, str), "a number or a text"),
    "tuple[str, ...]": ((tuple, list), "a list of texts"),
    "tuple[int, ...]": ((tuple, list), "a list of whole numbers"),
}


def check(settings: Any, path: str, error: type[KVCoreError] = ConfigError) -> None:
    """Type, choices and bounds of every field that `key` made; lists become tuples.

    Args:
        settings: A frozen dataclass, from its `__post_init__`.
        path: Where it stands in the tree, such as ``cache``; empty for a root.
        error: The class to raise.
    """
    for f in fields(settings):
        if "help" in f.metadata:
            where, value = f"{path}.{f.name}".lstrip("."), getattr(settings, f.name)
            _check(where, value, str(f.type), f.metadata, error)
            if isinstance(value, list):
                object.__setattr__(settings, f.name, tuple(value))


def _check(where: str, value: Any, declared: str, meta: Mapping[str, Any], error: type[KVCoreError]) -> None:
    if value is None and (declared.endswith("| None") or declared == "Length"):
        return
    kinds, allowed = _KINDS.get(declared.removesuffix(" | None"), ((object,), ""))
    # True is a number to Python, and to nobody who sets one.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and object not in kinds):
        raise error(f"{where} is {type(value).__name__}", field=where, got=value, allowed=allowed)
    if meta["choices"] and value not in meta["choices"]:
        raise error(f"{where} does not take this value", field=where, got=value, allowed=meta["choices"])
    if isinstance(value, tuple | list):
        inner: type = str if "str" in declared else int
        if not all(isinstance(v, inner) and not isinstance(v, bool) for v in value):
            raise error(f"{where} holds something else", field=where, got=list(value), allowed=allowed)
        for item in value if inner is int else ():
            _check_bounds(where, item, meta, error)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_bounds(where, value, meta, error)


def _check_bounds(where: str, value: float, meta: Mapping[str, Any], error: type[KVCoreError]) -> None:
    least, most, above = meta["least"], meta["most"], meta["above"]
    if most is None and isinstance(value, int):
        most = MOST
    # A whole number beyond every float is finite to Python, overflows in arithmetic, and may be too long to print.
    finite = abs(value) <= sys.float_info.max
    inside = finite and (least is None or value >= least) and (most is None or value <= most)
    if not inside or (above is not None and not value > above):
        low = f"> {above}" if above is not None else "" if least is None else f">= {least}"
        raise error(
            f"{where} is out of range",
            field=where,
            got=value if finite or isinstance(value, float) else "a number beyond every float",
            allowed=" and ".join(bound for bound in (low, "" if most is None else f"<= {most}") if bound),
        )
