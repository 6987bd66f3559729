"""Where `conf/` lies: inside the package in a wheel, beside it in a source tree."""

from __future__ import annotations

from pathlib import Path

import kvcore
from kvcore.errors import ConfigError


def conf_dir() -> Path:
    """The folder of configurations, in both modes of installation."""
    package = Path(kvcore.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
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


def presets(group: str) -> list[str]:
    """The files of a group, such as ``model`` or ``backends/torch``, without their ending; sorted."""
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))
