"""`kvcore plan`: capacity from `config.json` alone. No weights, no GPU, no torch."""

from __future__ import annotations

from dataclasses import replace

from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.build import build
from kvcore.config.validate import MOST
from kvcore.engine.planning import prepare_plan
from kvcore.engine.settings import EngineSettings
from kvcore.errors import ConfigError, KVCoreError
from kvcore.plan.explain import waste_fraction
from kvcore.plan.planner import Plan

# Padding worth a second plan.
MUCH = 0.01


def execute(job: Job) -> Result:
    """Plan; status 1 when `max_model_len` does not fit, with the full plan all the same."""
    lengths = job.composed.config.plan.lengths
    if not all(1 <= n <= MOST for n in lengths):
        raise ConfigError("a length is out of range", field="plan.lengths", got=lengths, allowed=f"1 to {MOST} each")
    built = build(job.composed, job.registry, purpose="plan")
    plan, selection = prepare_plan(built.settings, job.registry, purpose="plan")
    device = built.settings.device
    document = {
        "model": built.model,
        "device": {"kind": device.kind, "name": device.name, "present": device.present},
        "dtype": built.settings.facts.dtype,
        **plan.as_dict(lengths),
        "passed_over": selection.passed_over,
        "notes": [*built.notes, *selection.notes],
    }
    text = [f"{built.model} in {built.settings.facts.dtype} on {device.name or device.kind}", plan.explain()]
    for choice in selection.classes:
        if choice.chosen and not choice.chosen.verdict.installed_here:
            text.append(f"note: {choice.chosen.name} is not usable here yet: {choice.chosen.verdict.missing}")
    text += [f"note: {note}" for note in document["notes"]]
    text += _better_placement(built.settings, job, plan)
    at_once = ", ".join(f"{n}: {count}" for n, count in document["simultaneous"].items())
    text.append(f"whole sequences at once, by length: {at_once}")
    return Result(document, "\n".join(text), DONE if plan.fits else NO)


def _better_placement(settings: EngineSettings, job: Job, plan: Plan) -> list[str]:
    """Whether `packed` would pad less than what auto took, as a line for people."""
    mine = waste_fraction(plan)
    if settings.cache.placement != "auto" or mine < MUCH:
        return []
    packed = replace(settings, cache=replace(settings.cache, placement="packed"))
    try:
        other = waste_fraction(prepare_plan(packed, job.registry, purpose="plan")[0])
    except KVCoreError:  # it cannot be packed at all
        return []
    return [f"note: cache.placement=packed would pad {other:.2%} (it cannot be run yet)"] if other < mine else []
