"""The ranks of ``conf/priorities.yaml``."""

from __future__ import annotations

from functools import cache

from omegaconf import OmegaConf

from kvcore.config.home import conf_dir
from kvcore.errors import ConfigError
from kvcore.registry.priority import Priorities


@cache
def priorities() -> Priorities:
    """Per device class, or device class and kind of cache, the rank of each backend that it names.

    Raises:
        ConfigError: The file holds something else.
    """
    file = conf_dir() / "priorities.yaml"
    content = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(content, dict):
        raise ConfigError("no mapping", field=str(file), got=type(content).__name__, allowed="a mapping")
    for name, ranks in content.items():
        good = isinstance(ranks, dict) and all(
            isinstance(k, str) and isinstance(v, int) and not isinstance(v, bool) for k, v in ranks.items()
        )
        if not good:
            raise ConfigError(
                "a device class has a whole number for each backend",
                field=f"{file.name}: {name!s}",
                got=ranks,
                allowed="{backend: rank}",
            )
    return {str(name): dict(ranks) for name, ranks in content.items()}
