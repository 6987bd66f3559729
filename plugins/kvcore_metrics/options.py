"""The options of this plugin: the node ``plugins.metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.backend import ConfigError


@dataclass(frozen=True)
class MetricsOptions:
    """Where step metrics go; nothing is written unless a path is given.

    Attributes:
        jsonl: File to which one JSON object a step is appended.
        prometheus: File that is rewritten after each step in Prometheus text form, for the
            textfile collector of the node exporter (it reads names that end in ``.prom``).
        residency: Share of cached blocks whose time in the cache is measured; needs ``cache.events=true``.
    """

    jsonl: str | None = field(default=None, metadata={"help": "append one JSON object a step to this file"})
    prometheus: str | None = field(
        default=None, metadata={"help": "keep this file in Prometheus text form, rewritten each step"}
    )
    residency: float = field(
        default=1 / 64,
        metadata={"help": "share of cached blocks whose time in the cache is measured; needs cache.events=true"},
    )

    def __post_init__(self) -> None:
        if not 0 <= self.residency <= 1:
            raise ConfigError(
                "a share is out of range", field="plugins.metrics.residency", got=self.residency, allowed="0 to 1"
            )
