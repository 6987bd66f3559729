"""The observer plugin: step metrics, through the hook `kvcore_step_finished` alone.

kvcore run plugins.metrics.jsonl=steps.jsonl plugins.metrics.prometheus=kvcore.prom
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.backend import hookimpl
from kvcore_metrics.options import MetricsOptions
from kvcore_metrics.sinks import JsonLines, PrometheusText, Sink

_SINKS: list[Sink] = []


@hookimpl
def kvcore_options() -> type[MetricsOptions]:
    """Our node is ``plugins.metrics``."""
    return MetricsOptions


@hookimpl
def kvcore_configure(options: MetricsOptions) -> None:
    """Open what was asked for; the sinks of an earlier engine of this process are closed."""
    while _SINKS:
        _SINKS.pop().close()
    if options.jsonl is not None:
        _SINKS.append(JsonLines(options.jsonl))
    if options.prometheus is not None:
        _SINKS.append(PrometheusText(options.prometheus))


@hookimpl
def kvcore_step_finished(stats: Mapping[str, float]) -> None:
    """Hand the numbers to every sink."""
    for sink in _SINKS:
        sink.step(stats)
