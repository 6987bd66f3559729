"""`kvcore layout`: where every byte of the cache lies, drawn from the plan itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.cli.commands import Command
from kvcore.cli.result import Job, Result
from kvcore.config.schema import FILLED, ONE_RANK, ModelRoot, RankedKeys, ServedRoot, Unbuilt, without
from kvcore.settings.key import key


@dataclass(frozen=True)
class Keys(RankedKeys, ServedRoot):
    """A model's cache and its size."""

    UNUSED: ClassVar[frozenset[str]] = FILLED | {"device.name", "engine.max_num_seqs", "engine.max_num_batched_tokens"}
    UNBUILT: ClassVar[Unbuilt] = without(ModelRoot.UNBUILT, ONE_RANK)

    format: str = key("text", "how the picture is drawn", choices=("text", "svg", "html"))


COMMAND = Command("layout", "a picture of the cache memory: groups, tensors, pages, fields, padding", Keys)


def execute(job: Job[Keys]) -> Result:
    """Draw the plan of every rank."""
    from kvcore.cli.picture import describe, draw
    from kvcore.config.build import build
    from kvcore.engine.planning import prepare_plan
    from kvcore.plan.explain import size

    built = build(job.composed, job.registry, purpose="plan")
    plan, selection = prepare_plan(built.settings, job.registry, purpose="plan")
    config, form = plan.capacity.config, job.composed.config.format
    document = {"model": built.model, "options": selection.options, **describe(config)}
    if form == "text":
        return Result(document, draw(config))
    from kvcore.cli.drawing.html import html
    from kvcore.cli.drawing.scene import scene
    from kvcore.cli.drawing.svg import svg

    rows, title = scene(plan.capacity), f"{built.model}: placement {config.placement}, {size(config.total_bytes)}"
    picture = svg(rows, title) if form == "svg" else html(rows, title, config)
    return Result({**document, "picture": picture}, picture.rstrip("\n"))
