"""The list of keys: for `--help`, and to tell an unknown key before Hydra sees it. No Hydra here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from kvcore.config.schema import EngineRoot, Root
from kvcore.registry.registry import Registry


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: Full name, such as ``cache.block_size``.
        type: Its type, for people.
        default: Its default.
        help: One line: ``metadata["help"]`` of the field, else its entry under ``Attributes:`` in the
            docstring of its dataclass.
        choices: Allowed values, or None.
        least, most, above: Bounds, or None.
    """

    path: str
    type: str
    default: object
    help: str = ""
    choices: tuple[str, ...] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None


def all_keys(registry: Registry, root: type[Root] = EngineRoot) -> list[Key]:
    """Every key that a root takes, with the options of the installed backends and plugins, in the schema's order."""
    found: list[Key] = []
    hints = get_type_hints(root)
    for f in fields(root):
        if f.name == "backends":
            for name, spec in sorted(registry.backends.items()):
                found += keys_of(spec.Config, f"backends.{name}")
        elif f.name == "plugins":
            for name, config in sorted(registry.options.items()):
                found += keys_of(config, f"plugins.{name}")
        else:
            found += _key(f, f.name, hints[f.name])
    return [k for k in found if k.path not in root.UNUSED and k.path != "device.preset"]


def keys_of(config: type[Any], prefix: str) -> list[Key]:
    """The keys of a dataclass, those of nested ones included."""
    hints = get_type_hints(config)
    told = _attributes(config)
    return [
        k for f in fields(config) if f.init for k in _key(f, f"{prefix}.{f.name}", hints[f.name], told.get(f.name, ""))
    ]


def _attributes(config: type[Any]) -> dict[str, str]:
    """What the ``Attributes:`` section of a docstring says of each field; one entry may name several."""
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("\nAttributes:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section.partition("\n\n")[0]):
        names, colon, text = entry.partition(":")
        if colon and names[:1].isspace():
            found |= dict.fromkeys(names.replace(" ", "").split(","), " ".join(text.split()))
    return found


def _key(f: Field[Any], path: str, hint: Any, told: str = "") -> Iterator[Key]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield from keys_of(hint, path)
        return
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    meta: Mapping[str, Any] = f.metadata
    choices = meta.get("choices")
    yield Key(
        path,
        _shown(hint),
        default,
        str(meta.get("help") or told),
        tuple(choices) if choices else None,
        meta.get("least"),
        meta.get("most"),
        meta.get("above"),
    )


def _shown(hint: Any) -> str:
    if isinstance(hint, type) and not hasattr(hint, "__args__"):
        return hint.__name__
    # A list is how a tuple is typed.
    return re.sub(r"tuple\[(\w+), \.\.\.\]", r"list[\1]", str(hint).replace("typing.", "").replace(" | None", ""))
