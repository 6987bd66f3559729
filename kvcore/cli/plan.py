"""`kvcore plan`: capacity from `config.json` alone. No weights, no GPU, no torch."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcore.cli.commands import Command
from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.cli.sweep_table import summarize
from kvcore.config.schema import FILLED, ONE_RANK, ModelRoot, RankedKeys, ServedRoot, Unbuilt, node, without
from kvcore.plan.accounting import VERSIONS
from kvcore.settings.key import check, key

if TYPE_CHECKING:
    from kvcore.engine.settings import EngineSettings
    from kvcore.plan.planner import Plan
    from kvcore.plan.ranks import Ranks


@dataclass(frozen=True)
class PlanKeys:
    """What `kvcore plan` reports."""

    lengths: tuple[int, ...] = key((), "lengths at which whole sequences are counted", least=1)
    accounting: str | None = key(None, "also what another engine's log would say of the same input", choices=("vllm",))
    accounting_version: str = key("concurrency", "whose log: how it counts tokens", choices=VERSIONS)
    accounting_one_stage: bool = key(False, "charge the layers of all stages to one, as some published logs do")

    def __post_init__(self) -> None:
        check(self, "plan")


@dataclass(frozen=True)
class Keys(RankedKeys, ServedRoot):
    """A model's cache, its size, and what is asked of it."""

    UNUSED: ClassVar[frozenset[str]] = FILLED - {"cache.prefix_caching"}
    UNBUILT: ClassVar[Unbuilt] = without(ModelRoot.UNBUILT, ONE_RANK)

    plan: PlanKeys = node(PlanKeys)


COMMAND = Command(
    "plan", "how many tokens fit, on what layout, and why; needs neither weights nor GPU", Keys, summarize=summarize
)


def execute(job: Job[Keys]) -> Result:
    """Plan; status 1 when `max_model_len` does not fit, with the full plan all the same."""
    from kvcore.config.build import build
    from kvcore.engine.comparison import compare
    from kvcore.engine.least_ranks import least_ranks
    from kvcore.engine.planning import prepare_plan
    from kvcore.models.parameters.shares import StoredWeights
    from kvcore.plan.device import shown
    from kvcore.plan.explain import size

    lengths = list(job.composed.config.plan.lengths)
    built = build(job.composed, job.registry, purpose="plan")
    plan, selection = prepare_plan(built.settings, job.registry, purpose="plan")
    device, facts, weights = built.settings.device, built.settings.facts, built.settings.weights
    counted = weights if isinstance(weights, StoredWeights) else None
    least = least_ranks(built.settings, job.registry) if plan.device and not plan.fits else None
    keys = job.composed.config.plan
    accounting = (
        compare(built.settings, plan, keys.accounting_version, one_stage=keys.accounting_one_stage)
        if (keys.accounting)
        else None
    )
    document = {
        "model": built.model,
        "device": {"kind": device.kind, "name": device.name, "present": device.present},
        "dtype": facts.dtype,
        "weights": None if counted is None else {"bytes": counted.total, "source": counted.source},
        **plan.as_dict(lengths),
        "device_memory": [terms.as_dict() for terms in plan.device],
        "accounting": accounting.document if accounting else None,
        "fits_with": None if least is None else {"parallel.tensor": least.tensor, "parallel.pipeline": least.pipeline},
        "options": selection.options,
        "passed_over": selection.passed_over,
        "notes": [*built.notes, *(counted.notes if counted and plan.device else ()), *selection.notes],
    }
    text = [f"{built.model} in {facts.dtype} on {device.name or device.kind}", *_ranks(built.settings, plan)]
    if plan.device and counted is not None:
        text.append(f"weights: {size(counted.total)} by {counted.source}")
        text += shown(plan.device, device.name or device.kind)
    text.append(plan.explain())
    if plan.device and not plan.fits:
        text.append(_where_it_fits(least))
    for choice in selection.classes:
        if choice.chosen and not choice.chosen.verdict.installed_here:
            text.append(f"note: {choice.chosen.name} is not usable here yet: {choice.chosen.verdict.missing}")
    text += [f"note: {note}" for note in document["notes"]]
    text += accounting.text if accounting else []
    at_once = ", ".join(f"{n}: {count}" for n, count in document["simultaneous"].items())
    text.append(f"whole sequences at once, by length: {at_once}")
    return Result(document, "\n".join(text), DONE if plan.fits else NO)


def _ranks(settings: EngineSettings, plan: Plan) -> list[str]:
    """How the model is shared out, and which rank limits all of them."""
    ranks = settings.ranks
    if ranks.count == 1:
        return []
    limiting = plan.capacity.config.global_rank
    stages = ranks.stages(settings.facts.num_layers)
    shares = ", ".join(str(len(layers)) for layers in stages)
    return [
        f"{ranks.count} ranks: parallel.tensor={ranks.tensor} parallel.pipeline={ranks.pipeline}, stages of {shares} "
        f"layers; what follows is rank {limiting}, which limits all of them"
    ]


def _where_it_fits(least: Ranks | None) -> str:
    if least is None:
        return "no number of ranks makes it fit on this device"
    stages = f" parallel.pipeline={least.pipeline}" if least.pipeline > 1 else ""
    return f"it fits with parallel.tensor={least.tensor}{stages}"
