"""`kvcore plan`: capacity from `config.json` alone. No weights, no GPU, no torch."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.cli.commands import Command
from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.schema import FILLED, ModelRoot, ServedRoot, Unbuilt, node
from kvcore.settings.key import check, key


@dataclass(frozen=True)
class PlanKeys:
    """What `kvcore plan` reports."""

    lengths: tuple[int, ...] = key((), "lengths at which whole sequences are counted", least=1)

    def __post_init__(self) -> None:
        check(self, "plan")


@dataclass(frozen=True)
class Keys(ServedRoot):
    """A model's cache, its size, and what is asked of it."""

    UNUSED: ClassVar[frozenset[str]] = FILLED
    UNBUILT: ClassVar[Unbuilt] = {
        **ModelRoot.UNBUILT,
        "plan.accounting": ("null", "leave it out: kvcore's own accounting is exact"),
        "plan.accounting_version": ("null", "leave it out"),
    }

    plan: PlanKeys = node(PlanKeys)


COMMAND = Command("plan", "how many tokens fit, on what layout, and why; needs neither weights nor GPU", Keys)


def execute(job: Job[Keys]) -> Result:
    """Plan; status 1 when `max_model_len` does not fit, with the full plan all the same."""
    from kvcore.config.build import build
    from kvcore.engine.planning import prepare_plan

    lengths = list(job.composed.config.plan.lengths)
    built = build(job.composed, job.registry, purpose="plan")
    plan, selection = prepare_plan(built.settings, job.registry, purpose="plan")
    device = built.settings.device
    document = {
        "model": built.model,
        "device": {"kind": device.kind, "name": device.name, "present": device.present},
        "dtype": built.settings.facts.dtype,
        **plan.as_dict(lengths),
        "options": selection.options,
        "passed_over": selection.passed_over,
        "notes": [*built.notes, *selection.notes],
    }
    text = [f"{built.model} in {built.settings.facts.dtype} on {device.name or device.kind}", plan.explain()]
    for choice in selection.classes:
        if choice.chosen and not choice.chosen.verdict.installed_here:
            text.append(f"note: {choice.chosen.name} is not usable here yet: {choice.chosen.verdict.missing}")
    text += [f"note: {note}" for note in document["notes"]]
    at_once = ", ".join(f"{n}: {count}" for n, count in document["simultaneous"].items())
    text.append(f"whole sequences at once, by length: {at_once}")
    return Result(document, "\n".join(text), DONE if plan.fits else NO)
