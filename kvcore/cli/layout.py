"""`kvcore layout`: where every byte of the cache lies, drawn from the plan itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.cli.commands import Command
from kvcore.cli.result import Job, Result
from kvcore.config.schema import FILLED, ONE_RANK, ModelRoot, RankedKeys, ServedRoot, Unbuilt, without


@dataclass(frozen=True)
class Keys(RankedKeys, ServedRoot):
    """A model's cache and its size."""

    UNUSED: ClassVar[frozenset[str]] = FILLED | {"device.name", "engine.max_num_seqs", "engine.max_num_batched_tokens"}
    UNBUILT: ClassVar[Unbuilt] = {
        **without(ModelRoot.UNBUILT, ONE_RANK),
        "format": ("text", "use format=text, or output=json for the data"),
    }


COMMAND = Command("layout", "a picture of the cache memory: groups, tensors, pages, fields, padding", Keys)


def execute(job: Job[Keys]) -> Result:
    """Draw the plan of every rank."""
    from kvcore.cli.picture import describe, draw
    from kvcore.config.build import build
    from kvcore.engine.planning import prepare_plan

    built = build(job.composed, job.registry, purpose="plan")
    plan, selection = prepare_plan(built.settings, job.registry, purpose="plan")
    config = plan.capacity.config
    return Result({"model": built.model, "options": selection.options, **describe(config)}, draw(config))
