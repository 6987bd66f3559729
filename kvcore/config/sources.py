"""Settings that are not typed as overrides: a YAML file, an experiment preset, keywords of `kvcore.LLM`.

All of them become overrides, so that one parser and one set of checks serves every way in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from kvcore.config.home import preset_files, user_path
from kvcore.errors import ConfigError

EXPERIMENT = "experiment"
# Keys whose value names a file of presets.
GROUPS = ("model", "device", EXPERIMENT)


@dataclass(frozen=True)
class Files:
    """What `--config` and `--config-dir` named.

    Attributes:
        config: A YAML file of keys, or None.
        dirs: Folders with presets of one's own: ``model/``, ``device/``, ``backends/<name>/``, ``experiment/``.
    """

    config: str | None = None
    dirs: tuple[str, ...] = ()

    def folders(self) -> tuple[Path, ...]:
        """The folders; `ConfigError` names one that is not there."""
        found = tuple(user_path("--config-dir", text) for text in self.dirs)
        for folder in found:
            if not folder.is_dir():
                raise ConfigError("there is no such folder", field="--config-dir", got=str(folder), allowed="a folder")
        return found


def experiment_overrides(name: str, folders: Sequence[Path]) -> list[str]:
    """The overrides of an experiment preset.

    Hydra's own form serves: the ``@package _global_`` line is a comment, the entries of ``defaults`` choose presets.
    """
    known = preset_files(EXPERIMENT, folders)
    if name not in known:
        raise ConfigError(
            f"there is no preset {name!r} for experiment",
            field=EXPERIMENT,
            got=name,
            allowed=sorted(known) or "none: there are no presets",
            remedy="--config-dir DIR names a folder with experiment/NAME.yaml",
        )
    content = read_yaml(str(known[name]), EXPERIMENT)
    chosen: list[str] = []
    for entry in content.pop("defaults", None) or ():
        if isinstance(entry, dict) and len(entry) == 1:
            ((group, preset),) = entry.items()
            chosen.append(f"{str(group).removeprefix('override ').lstrip('/')}={preset}")
        elif entry != "_self_":
            raise ConfigError(
                "this entry of defaults is not understood",
                field=EXPERIMENT,
                got=entry,
                allowed="- override /GROUP: PRESET",
            )
    return [*chosen, *overrides_of(content)]


def read_yaml(path: str, key: str) -> dict[str, Any]:
    """The content of a YAML file.

    Raises:
        ConfigError: Missing, not YAML, or no mapping of names; names `key`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    file = user_path(key, path)
    try:
        content = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8") or "{}"), resolve=False)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be read: {error.strerror}", field=key, got=path, allowed="a YAML file"
        ) from error
    except (YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigError(f"the file is not YAML{where}", field=key, got=path, allowed="a YAML file") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError("the file holds no keys", field=key, got=path, allowed="KEY: VALUE")
    return {str(name): value for name, value in content.items()}


def overrides_of(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The overrides that say what nested keys say; dataclasses count as the fields that differ from their defaults."""
    found: list[str] = []
    for name, value in content.items():
        path = f"{prefix}{name}"
        inner = _differing(value) if is_dataclass(value) else value
        # A node of which nothing is said: `cache={}`.
        if isinstance(inner, Mapping) and (inner or not prefix or is_dataclass(value)):
            found += overrides_of(inner, f"{path}.")
        elif isinstance(value, str) and (path in GROUPS or re.fullmatch(r"backends\.\w+", path)):
            found.append(f"{path.replace('.', '/')}={value}")
        else:
            found.append(f"{path}={said(value)}")
    return found


def _differing(value: Any) -> dict[str, Any]:
    found = {}
    for f in fields(value):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if getattr(value, f.name) != default:
            found[f.name] = getattr(value, f.name)
    return found


def said(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A backslash counts only before a quote.
        return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{said(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(said, value)) + "]"
    return str(value)
