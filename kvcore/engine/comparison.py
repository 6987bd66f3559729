"""Another engine's figures for the input that was planned, rank by rank, beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcore.engine.settings import EngineSettings
from kvcore.plan.accounting import VllmPlan, differences, vllm_plan
from kvcore.plan.explain import size
from kvcore.plan.planner import Plan


@dataclass(frozen=True)
class Comparison:
    """The figures, for JSON and for people."""

    document: dict[str, Any]
    text: list[str]


def compare(settings: EngineSettings, plan: Plan, version: str, *, one_stage: bool) -> Comparison:
    """What vLLM's log would say.

    Args:
        settings: What was planned for.
        plan: Ours.
        version: Whose log; one of `kvcore.plan.accounting.VERSIONS`.
        one_stage: Whether the layers of all stages are charged to each.

    Raises:
        LayoutError: vLLM has no plan for these caches.
    """
    cache, tensor = settings.cache, settings.ranks.tensor
    stages = settings.ranks.stages(settings.facts.num_layers)
    found: list[tuple[VllmPlan, int]] = []
    for stage, layers in enumerate(stages):
        mine = {c: s for c, s in plan.caches.items() if one_stage or c.layer in layers}
        given = cache.bytes_in_all if cache.memory is not None else plan.configs[stage * tensor].total_bytes
        memory = max(0, plan.device[stage].left) if plan.device else given or 0
        if mine:
            made = vllm_plan(
                mine,
                memory,
                settings.engine,
                version=version,
                block_size=cache.tokens_a_block,
                prefix_caching=cache.prefix_caching,
            )
            found.append((made, memory))
    theirs, memory = min(found, key=lambda pair: pair[0].num_blocks)
    longest = settings.engine.max_model_len
    ours, tokens = plan.capacity.simultaneous(longest), int(plan.capacity.concurrency(longest) * longest)
    why = differences(theirs, ours, tokens)
    groups = ", ".join(
        f"{g.layers} {g.spec.kind}" + (f" and {g.padding} padding" if g.padding else "") for g in theirs.groups
    )
    text = [
        f"vLLM ({version}), {size(memory)}: {theirs.num_blocks} blocks of {size(theirs.block_bytes)}; layers {groups}",
        *(f"  {line}" for line in why),
    ]
    return Comparison({**theirs.as_dict(memory), "differences": why}, text)
