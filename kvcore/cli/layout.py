"""`kvcore layout`: where every byte of the cache lies, drawn from the plan itself."""

from __future__ import annotations

from kvcore.cli.picture import describe, draw
from kvcore.cli.result import Job, Result
from kvcore.config.build import build
from kvcore.engine.planning import prepare_plan


def execute(job: Job) -> Result:
    """Draw the plan of every rank."""
    built = build(job.composed, job.registry, purpose="plan")
    plan, _ = prepare_plan(built.settings, job.registry, purpose="plan")
    config = plan.capacity.config
    return Result({"model": built.model, **describe(config)}, draw(config))
