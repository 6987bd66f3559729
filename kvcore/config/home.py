"""Where configurations lie: our `conf/`, in the package of a wheel or beside it in a source tree, and users' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kvcore
from kvcore.errors import ConfigError


def conf_dir() -> Path:
    """The folder of configurations, in both modes of installation."""
    package = Path(kvcore.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "samples.yaml").is_file():
            return folder
    raise ConfigError(
        "the configuration folder of kvcore is missing",
        field="conf",
        got=str(package / "conf"),
        remedy="install kvcore again",
    )


def user_path(key: str, text: str) -> Path:
    """A path that a user gave, relative to where he is, with his home folder for ``~``.

    Raises:
        ConfigError: It is empty, or no path; names `key`.
    """
    try:
        if not text.strip() or "\0" in text:
            raise RuntimeError
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # a home folder that nobody has
        raise ConfigError(f"{key} is not a path", field=key, got=text, allowed="a path") from error


def preset_files(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """The files of a group, such as ``model`` or ``backends/torch``, by name; ours, then those of `folders`.

    Raises:
        ConfigError: Two folders have one of the same name.
    """
    found: dict[str, Path] = {}
    for folder in (conf_dir(), *folders):
        for file in sorted((folder / group).glob("*.yaml")):
            if file.stem in found:
                raise ConfigError(
                    f"there are two presets {file.stem} for {group}",
                    field=group,
                    got=[str(found[file.stem]), str(file)],
                    allowed="one of each name",
                    remedy="rename yours",
                )
            found[file.stem] = file
    return found


def presets(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Their names, sorted."""
    return sorted(preset_files(group, folders))
