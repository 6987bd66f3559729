"""Overrides as they are typed: parsed with Hydra's own parser, then checked by us before Hydra composes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from kvcore.config.home import presets
from kvcore.config.keys import all_keys
from kvcore.config.schema import Root
from kvcore.errors import ConfigError, NotBuiltError, UnknownKeyError
from kvcore.registry.registry import Registry

# A node that may be given whole, as a dictionary, and takes any key below it.
FREE = "model.geometry"
_KEY = re.compile(r"\w+([./]\w+)*", re.ASCII)


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides.

    Raises:
        UnknownKeyError: `+`, `++` or `~` is used.
        ConfigError: The grammar is broken.
    """
    for text in overrides:
        if not isinstance(text, str):  # from the library
            raise ConfigError("an override is not a text", field="override", got=text, allowed="texts KEY=VALUE")
        if text[:1] in ("+", "~"):
            sign = "++" if text.startswith("++") else text[0]
            raise UnknownKeyError(
                f"'{sign}' is not accepted: every key of kvcore exists, none is added or removed",
                field=text.lstrip("+~").partition("=")[0],
                got=text,
                allowed="KEY=VALUE",
                remedy="write the key without the sign; `kvcore COMMAND --help` lists all keys",
            )
        if "=" not in text:
            raise ConfigError(
                "this is neither an option of the command nor an override",
                field="override",
                got=text,
                allowed="KEY=VALUE",
                remedy="text goes to `run` by --prompt; `kvcore COMMAND --help` lists options and keys",
            )
    found: list[Override] = []
    for text in overrides:
        try:
            found += OverridesParser.create().parse_overrides([text])
        except (HydraException, ValueError, RecursionError) as error:  # Python reads no number of 4,300 digits
            raise _unreadable(text) from error
    return found


def _unreadable(text: str) -> ConfigError:
    """In our words: the parser's name its own classes and states."""
    name, _, value = text.partition("=")
    if not _KEY.fullmatch(name):
        return ConfigError(
            "the part before = is no key",
            field=name,
            got=text,
            allowed="KEY=VALUE, with letters, digits, _ and . in the key",
            remedy="`kvcore COMMAND --help` lists all keys",
        )
    quoted = value.replace("'", "\\'")
    return ConfigError(
        "the value cannot be read: it has signs that mean something else",
        field=name,
        got=text,
        allowed="KEY=VALUE; a value with = , ( [ { $ or quotes in quotes",
        remedy=f"quote the value, and once more for the shell: \"{name}='{quoted}'\"",
    )


def check_keys(
    overrides: Sequence[Override], registry: Registry, root: type[Root], folders: Sequence[Path] = ()
) -> list[Override]:
    """Refuse unknown keys and presets, with what is close to them.

    Returns:
        The overrides without those that say of something unbuilt that it is not wanted.

    Raises:
        UnknownKeyError: The root has no such key; lists near matches.
        NotBuiltError: The key asks for what is not built yet.
        ConfigError: No such preset; lists those that exist.
        BackendError, PluginError: The key belongs to a backend that is not installed or is broken.
    """
    known = {k.path for k in all_keys(registry, root)}
    nodes = {path.rpartition(".")[0] for path in known}
    groups = {f.name for f in fields(root) if f.metadata.get("preset")}
    kept = []
    for override in overrides:
        name = override.key_or_group
        if override.package is not None:
            raise UnknownKeyError(
                "packages (KEY@PACKAGE) are not used in kvcore",
                field=name,
                got=override.input_line,
                allowed="KEY=VALUE",
            )
        if name in root.UNBUILT:
            _check_unbuilt(override, *root.UNBUILT[name])
            continue
        kept.append(override)
        if "/" in name:
            _check_backend_preset(override, registry, folders)
        elif name in groups:
            _check_preset(override, name, folders)
        elif FREE in known and name.startswith(FREE):
            continue
        elif name and name in nodes:
            raise UnknownKeyError(
                f"{name} is a group of keys: set them one by one",
                field=name,
                got=override.input_line,
                allowed=_below(name, known),
            )
        elif name not in known:
            _refuse_unknown(name, override, known, registry, root)
    return kept


def _check_unbuilt(override: Override, without: str, remedy: str) -> None:
    said = str(override.input_line).partition("=")[2].strip("'\"").lower()
    if said not in (without, "0b" if without == "0" else without):
        raise NotBuiltError(
            f"{override.key_or_group} is not built yet",
            field=override.key_or_group,
            got=override.input_line,
            allowed=without,
            remedy=remedy,
        )


def _check_backend_preset(override: Override, registry: Registry, folders: Sequence[Path]) -> None:
    group, _, backend = override.key_or_group.partition("/")
    if group != "backends" or not backend or "/" in backend:
        raise UnknownKeyError(
            "no such group of presets",
            field=override.key_or_group,
            got=override.input_line,
            allowed=["model=PRESET", "device=PRESET", "backends/NAME=PRESET", "experiment=PRESET"],
        )
    registry.backend(backend, key=override.key_or_group)
    _check_preset(override, override.key_or_group, folders)


def _check_preset(override: Override, group: str, folders: Sequence[Path]) -> None:
    known = presets(group, folders)
    values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
    for value in values:
        if str(value) not in known:
            raise ConfigError(
                f"there is no preset {value!r} for {group}",
                field=group,
                got=value,
                allowed=known or "none: there are no presets",
                remedy="for a directory or config.json use model.path=" if group == "model" else None,
            )


def _refuse_unknown(name: str, override: Override, known: set[str], registry: Registry, root: type[Root]) -> None:
    parts = name.split(".")
    if parts[0] == "backends" and len(parts) > 1:
        registry.backend(parts[1], key=f"backends.{parts[1]}")
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    last = [k for k in sorted(known) if k.rpartition(".")[2] == parts[-1] and k not in near]
    elsewhere = name in root.UNUSED or name in {k.path for k in all_keys(registry)}
    raise UnknownKeyError(
        f"{name} changes nothing here: this command does not use it" if elsewhere else f"there is no key {name}",
        field=name,
        got=override.input_line,
        allowed=(near + last)[:5] or _below(parts[0], known),
        remedy="`kvcore COMMAND --help` lists all keys",
    )


def _below(node: str, known: set[str]) -> list[str] | str:
    return sorted(k for k in known if k.startswith(node + ".")) or "the keys of `kvcore COMMAND --help`"
