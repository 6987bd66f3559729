"""The options of this plugin: the node ``plugins.metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MetricsOptions:
    """Where step metrics go; nothing is written unless a path is given.

    Attributes:
        jsonl: File to which one JSON object a step is appended.
        prometheus: File that is rewritten after each step in Prometheus text form, for the
            textfile collector of the node exporter (it reads names that end in ``.prom``).
    """

    jsonl: str | None = field(default=None, metadata={"help": "append one JSON object a step to this file"})
    prometheus: str | None = field(
        default=None, metadata={"help": "keep this file in Prometheus text form, rewritten each step"}
    )
