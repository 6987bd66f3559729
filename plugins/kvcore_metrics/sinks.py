"""Where the numbers of a step can go: each sink takes the mapping of the hook `kvcore_step_finished`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvcore.backend import Cleared, ConfigError, Event, Removed, Stored

# States after a step.
GAUGES = {
    "num_running": "requests that are running",
    "num_waiting": "requests that are waiting",
    "blocks_used": "cache blocks in use",
    "blocks_total": "cache blocks that requests can be given",
    "blocks_cached": "cache blocks whose content can be hit",
}
# Totals since the engine started.
COUNTERS = {
    "preemptions": "requests that lost their blocks and are computed again",
    "prefix_hit_tokens": "prompt tokens found in the prefix cache",
    "prompt_tokens": "prompt tokens of admitted requests",
    "output_tokens": "tokens generated",
    "copied_blocks": "blocks copied on write",
    "evictions": "cached blocks that were handed out for other content",
}
# Of the prefix cache, with `cache.events=true`.
EVENTS: dict[type[Event], tuple[str, str]] = {
    Stored: ("blocks_stored", "blocks whose content became known"),
    Removed: ("blocks_removed", "blocks whose content was forgotten"),
    Cleared: ("cache_cleared", "resets of the prefix cache"),
}
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
RESIDENCY_BUCKETS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
STEP_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Sink(Protocol):
    """Takes the numbers of every step."""

    def step(self, stats: Mapping[str, float]) -> None:
        """Record one step."""

    def cache(self, events: Sequence[Event], residency: Sequence[float]) -> None:
        """Record what happened to cached blocks, and the seconds that those of the sample were cached."""

    def close(self) -> None:
        """Give back what is open."""


class JsonLines:
    """Appends one JSON object a step, with the wall-clock time; complete after every step."""

    def __init__(self, path: str) -> None:
        self._file = open(_checked("plugins.metrics.jsonl", path), "a", encoding="utf-8")  # noqa: SIM115

    def step(self, stats: Mapping[str, object]) -> None:
        """Write the line and hand it to the system."""
        self._file.write(json.dumps({"time": time.time(), **stats}) + "\n")
        self._file.flush()

    def cache(self, events: Sequence[Event], residency: Sequence[float]) -> None:
        """Write how many of each, and the sampled seconds."""
        self.step({**_counts(events), "residency_seconds": list(residency)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PrometheusText:
    """Keeps a file in Prometheus text form: counters, gauges and a histogram of step times.

    It has a `CollectorRegistry` of its own, so that two engines, or an application with metrics of its
    own, never meet in the process-wide one.
    """

    def __init__(self, path: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # late: only when asked for

        self._path = str(_checked("plugins.metrics.prometheus", path))
        self.registry = CollectorRegistry()
        self._counters = {n: Counter(f"kvcore_{n}", h, registry=self.registry) for n, h in COUNTERS.items()}
        self._gauges = {n: Gauge(f"kvcore_{n}", h, registry=self.registry) for n, h in GAUGES.items()}
        self._scheduled = Counter("kvcore_scheduled_tokens", "tokens computed", registry=self.registry)
        self._events = {n: Counter(f"kvcore_{n}", h, registry=self.registry) for n, h in EVENTS.values()}
        self._last: dict[str, float] = {}
        self._seconds = Histogram(
            "kvcore_step_seconds", "time of a step", buckets=STEP_SECONDS_BUCKETS, registry=self.registry
        )
        self._tokens = Histogram(
            "kvcore_step_tokens", "tokens that a step computes", buckets=TOKEN_BUCKETS, registry=self.registry
        )
        self._residency = Histogram(
            "kvcore_block_residency_seconds",
            "time that blocks of a sample were cached before they were forgotten",
            buckets=RESIDENCY_BUCKETS,
            registry=self.registry,
        )

    def step(self, stats: Mapping[str, float]) -> None:
        """Count the step and replace the file, so that a reader sees a whole one at any time."""
        from prometheus_client import write_to_textfile

        for name, counter in self._counters.items():
            total, last = stats.get(name, 0), self._last.get(name, 0)
            # A total that fell belongs to a new engine: it counts from the start.
            counter.inc(total - last if total >= last else total)
            self._last[name] = total
        self._scheduled.inc(stats.get("scheduled_tokens", 0))
        for name, gauge in self._gauges.items():
            gauge.set(stats.get(name, 0))
        self._seconds.observe(stats.get("seconds", 0))
        self._tokens.observe(stats.get("scheduled_tokens", 0))
        write_to_textfile(self._path, self.registry)

    def cache(self, events: Sequence[Event], residency: Sequence[float]) -> None:
        """Count; the file follows with the next step."""
        for name, count in _counts(events).items():
            self._events[name].inc(count)
        for seconds in residency:
            self._residency.observe(seconds)

    def close(self) -> None:
        """Nothing is open between steps."""


def _counts(events: Sequence[Event]) -> dict[str, int]:
    counts = dict.fromkeys((name for name, _ in EVENTS.values()), 0)
    for event in events:
        counts[EVENTS[type(event)][0]] += 1
    return counts


def _checked(key: str, text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"{key} cannot be written there", field=key, got=text, allowed="a file in a folder that exists"
        )
    return path
