"""`prepare`: from settings and a trace to a replay that is ready to run."""

from __future__ import annotations

from dataclasses import replace

from kvcore.engine.control_plane import make_manager, make_scheduler
from kvcore.engine.planning import prepare_plan
from kvcore.engine.settings import EngineSettings
from kvcore.plan.planner import Plan
from kvcore.registry.registry import Registry
from kvcore.replay.replay import Pace, Replay
from kvcore.replay.series import Series
from kvcore.replay.step_cost import StepCost
from kvcore.replay.trace import Trace
from kvcore.worker.sanitizer import Sanitizer


def prepare(
    settings: EngineSettings,
    registry: Registry,
    trace: Trace,
    cost: StepCost,
    *,
    every: float,
    pace: Pace = "trace",
    most_output: int | None = None,
) -> tuple[Replay, Plan, list[str]]:
    """Plan the cache and put scheduler and manager on it, as an engine would.

    Where not one sequence of `max_model_len` fits, the longest length that fits takes its place.

    Args:
        settings: Model, cache and limits.
        registry: Installed plugins.
        trace: Who comes when.
        cost: Duration of a step.
        every: Seconds between samples of the series.
        pace: As for `Replay`.
        most_output: As for `Replay`.

    Returns:
        The replay, the plan, and what people should know.

    Raises:
        KVCoreError: As `prepare_plan` and `KVCacheManager` say.
    """
    plan, selection = prepare_plan(settings, registry, purpose="plan")
    config, notes = plan.configs[0], list(selection.notes)
    if not plan.fits:
        longest, asked = plan.capacity.longest(), settings.engine.max_model_len
        if longest <= 1:  # a prompt of one token leaves no room for another
            plan.require_fit()
        notes.append(f"one sequence of {asked} tokens does not fit: prompts of {longest} and more are refused")
        settings = replace(settings, engine=replace(settings.engine, max_model_len=longest))
    scheduler = make_scheduler(settings, config, make_manager(settings, config, registry))
    series = Series(scheduler, tuple(g.block_size for g in config.kv_cache_groups), every)
    sanitizer = Sanitizer(config) if settings.cache.sanitize else None
    replay = Replay(trace, scheduler, cost, series, pace=pace, most_output=most_output, sanitizer=sanitizer)
    return replay, plan, notes
