"""The observer plugin: metrics of steps and of the prefix cache, through hooks alone.

kvcore run plugins.metrics.jsonl=steps.jsonl plugins.metrics.prometheus=kvcore.prom
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcore.backend import Event, hookimpl
from kvcore_metrics.options import MetricsOptions
from kvcore_metrics.residency import Residency
from kvcore_metrics.sinks import JsonLines, PrometheusText, Sink

_SINKS: list[Sink] = []
_RESIDENCY = [Residency(0)]


@hookimpl
def kvcore_options() -> type[MetricsOptions]:
    """Our node is ``plugins.metrics``."""
    return MetricsOptions


@hookimpl
def kvcore_configure(options: MetricsOptions) -> None:
    """Open what was asked for; the sinks of an earlier engine of this process are closed."""
    while _SINKS:
        _SINKS.pop().close()
    _RESIDENCY[:] = [Residency(options.residency)]
    if options.jsonl is not None:
        _SINKS.append(JsonLines(options.jsonl))
    if options.prometheus is not None:
        _SINKS.append(PrometheusText(options.prometheus))


@hookimpl
def kvcore_step_finished(stats: Mapping[str, float]) -> None:
    """Hand the numbers to every sink."""
    for sink in _SINKS:
        sink.step(stats)


@hookimpl
def kvcore_cache_events(events: Sequence[Event]) -> None:
    """Hand what happened to cached blocks to every sink, and how long those of the sample stayed."""
    if _SINKS:
        seconds = _RESIDENCY[0].hear(events)
        for sink in _SINKS:
            sink.cache(events, seconds)
