"""`kvcore replay`: the real scheduler and manager on a trace. No weights, no GPU, no torch."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from kvcore.cli.commands import Command
from kvcore.cli.result import Job, Result
from kvcore.config.schema import ServedRoot, node
from kvcore.errors import ConfigError
from kvcore.settings.key import check, key


@dataclass(frozen=True)
class ReplayKeys:
    """How a trace is replayed."""

    step_ms: float = key(20.0, "milliseconds of every step, whatever it computes", least=0, most=1e6)
    token_us: float = key(20.0, "microseconds of every token that a step computes", least=0, most=1e9)
    pace: str = key(
        "trace",
        "trace: requests come when they came; one_by_one: each ends before the next one comes",
        choices=("trace", "one_by_one"),
    )
    requests: int | None = key(None, "replay so many requests, the earliest", least=1)
    max_tokens: int | None = key(None, "generate at most so many tokens a request", least=1)
    every: float = key(10.0, "seconds of simulated time between two samples of the series", least=0.001, most=1e9)
    series: str | None = key(None, "file for the samples, as CSV")
    plot: str | None = key(None, "file for a picture of them, NAME.svg or NAME.png; needs kvcore[plot]")

    def __post_init__(self) -> None:
        check(self, "replay")


@dataclass(frozen=True)
class Keys(ServedRoot):
    """A model's cache, its size and policy, and a trace."""

    # Nothing is loaded, nothing is shown of the device, and all requests have one salt.
    UNUSED: ClassVar[frozenset[str]] = frozenset(
        {"model.package", "model.chat", "device.name", "cache.salt", "cache.events"}
    )

    trace: str | None = key(None, "the recorded load: NAME.csv of Azure's columns, or NAME.jsonl of Mooncake's")
    replay: ReplayKeys = node(ReplayKeys)


COMMAND = Command("replay", "the real scheduler and cache manager on a recorded load, in simulated time", Keys)


def execute(job: Job[Keys]) -> Result:
    """Replay."""
    from kvcore.cli.progress import Display
    from kvcore.config.build import build
    from kvcore.config.home import user_path
    from kvcore.replay.plot import check_plot, draw
    from kvcore.replay.replay import Pace
    from kvcore.replay.setup import prepare
    from kvcore.replay.step_cost import StepCost
    from kvcore.replay.summary import block_size_of, summarize
    from kvcore.replay.trace import read_trace

    config, asked = job.composed.config, job.composed.config.replay
    if config.trace is None:
        raise ConfigError(
            "there is nothing to replay", field="trace", allowed="NAME.csv or NAME.jsonl", remedy="say trace=FILE"
        )
    series_path, plot_path = _target("replay.series", asked.series), _target("replay.plot", asked.plot)
    if plot_path is not None:
        check_plot(plot_path)
    trace = read_trace(user_path("trace", config.trace), asked.requests)
    with Display() as display:
        built = build(job.composed, job.registry, purpose="plan")
        replay, plan, notes = prepare(
            built.settings,
            job.registry,
            trace,
            StepCost(asked.step_ms / 1e3, asked.token_us / 1e6),
            every=asked.every,
            pace=cast(Pace, asked.pace),
            most_output=asked.max_tokens,
        )
        replay.run(lambda done: display.fraction("replaying", done))
    if series_path is not None:
        with _writing("replay.series", series_path):
            replay.series.write_csv(series_path)
    if plot_path is not None:
        with _writing("replay.plot", plot_path):
            draw(replay.series.samples, plot_path, title=f"{trace.name} on {built.model}")
    groups = plan.as_dict()["groups"]
    document = {
        "model": built.model,
        **summarize(replay, block_size_of(plan.configs[0])),
        "cache": {"placement": plan.configs[0].placement, "total_bytes": plan.configs[0].total_bytes, "groups": groups},
        "eviction": built.settings.cache.eviction,
        "notes": [*built.notes, *notes],
    }
    return Result(document, _text(document))


def _target(name: str, text: str | None) -> Path | None:
    """A file to be written at the end, if one is asked for: a folder that is missing is told at the beginning."""
    from kvcore.config.home import user_path

    if text is None:
        return None
    path = user_path(name, text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"{name} cannot be written there", field=name, got=text, allowed="a file in a folder that exists"
        )
    return path


@contextmanager
def _writing(name: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror}", field=name, got=str(path)) from error


def _text(document: dict[str, Any]) -> str:
    from kvcore.plan.explain import size

    d, cache = document, document["cache"]
    sizes = ", ".join(f"{g['kind']} in blocks of {g['block_size']} tokens" for g in cache["groups"])
    refused = f"; {d['refused']} refused as too long" if d["refused"] else ""
    failed = f"; {d['failed']} ran out of cache although alone" if d["failed"] else ""
    rates = "the trace tells nothing of prompts"
    if d["hit_rate"] is not None:
        rates = f"{d['hit_rate']:.2%} of the prompt tokens, {d['block_hit_rate']:.2%} of the prompt blocks"
    lines = [
        f"trace     {d['trace']}: {d['requests']} requests{refused}{failed}",
        f"model     {d['model']}",
        f"cache     {size(cache['total_bytes'])}, placement {cache['placement']}, {sizes}; eviction {d['eviction']}",
        f"tokens    {d['prompt_tokens']} prompt, {d['output_tokens']} generated",
        f"prefixes  {rates} came from the cache",
        *_missed(d),
        f"blocks    {d['peak_blocks']} of {d['total_blocks']} in use at the peak; {d['evictions']} evicted; "
        f"{d['preemptions']} preemptions; {d['waste_fraction']:.2%} of the slots given out held no token",
        f"first     token after {_spread(d['first_token_seconds'])}",
        f"whole     request after {_spread(d['request_seconds'])}",
        f"time      {d['simulated_seconds']:.1f} s in {d['steps']} steps, replayed in {d['seconds']:.1f} s "
        f"({d['events_per_second']:.0f} events a second)",
    ]
    return "\n".join([*lines, *(f"note      {note}" for note in document["notes"])])


def _missed(document: dict[str, Any]) -> list[str]:
    told, total = document["missed_by_reason"], document["prompt_tokens"]
    return [f"missed    {', '.join(f'{n / total:.2%} {r}' for r, n in told.items())}"] if told else []


def _spread(quantiles: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {'-' if value is None else f'{value:.2f} s'}" for name, value in quantiles.items())
