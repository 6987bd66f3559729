"""`kvcore diff`: one batch, or a whole model, through two backends: where they part first."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.cli.progress import Display
from kvcore.cli.prompts import gather
from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.build import build
from kvcore.config.devices import device_facts
from kvcore.errors import ConfigError


def quoted(overrides: Sequence[str]) -> list[str]:
    """The overrides with the value of ``case=`` quoted: ids of cases hold signs of Hydra's grammar."""
    found = []
    for text in overrides:
        name, _, value = text.partition("=")
        plain = name == "case" and value[:1] not in ("'", '"') and "'" not in value
        found.append(f"case='{value}'" if plain and value else text)
    return found


def execute(job: Job) -> Result:
    """Compare; status 1 when they part."""
    config = job.composed.config
    a, b = (_name(job, side) for side in ("a", "b"))
    for key in ("backend", *(k for k in job.composed.given if k.startswith("backend_by_kind."))):
        if key in job.composed.given:
            raise ConfigError(
                "diff names its backends by a= and b=; each serves every layer", field=key, allowed="a=, b="
            )
    if config.case is not None:
        what = config.case
        if job.prompts or config.prompts:
            raise ConfigError(
                "a case of the kit has no prompts", field="case", got=config.case, allowed="case= or prompts"
            )
        from kvcore.diff.case import diff_case  # late: loads torch

        facts = device_facts(config.device)
        if not facts.present:
            raise ConfigError(
                "diff runs kernels: it needs a device that is here",
                field="device",
                got=config.device.preset,
                allowed="auto, cpu or cuda",
            )
        specs = [job.registry.backend(name) for name in (a, b)]
        parting = diff_case(config.case, specs, config.backends, facts)
    else:
        prompts = gather(job.prompts, config.prompts)
        with Display() as display:
            built = build(job.composed, job.registry, purpose="run", progress=display.fraction)
            display.stage("importing torch and transformers")
            from kvcore.diff.model import diff_model  # late: loads torch

            job.registry.configure(config.plugins)
            parting = diff_model(
                built.settings, (a, b), job.registry, prompts, built.sampling, chat=built.chat, progress=display.stage
            )
        what = f"{built.model}, {len(prompts)} prompts"
    document = {"a": a, "b": b, "what": what, **parting.as_dict()}
    largest = f"{parting.compared} outputs compared, largest difference {parting.max_abs_error:.3g}"
    if parting.first is None:
        return Result(document, f"{a} and {b} agree on {what}: {largest}", DONE)
    at = parting.first
    text = (
        f"{a} and {b} part on {what}, first at layer {at.layer}, token {at.token}, head {at.head} "
        f"(sequence {at.sequence}, step {at.step}): by {parting.first_error:.3g}, "
        f"tolerance {parting.first_tolerance:.3g}; {largest}"
    )
    return Result(document, text, NO)


def _name(job: Job, side: str) -> str:
    name: str | None = getattr(job.composed.config, side)
    if name is None:
        raise ConfigError(
            f"diff compares two backends, and {side}= is missing",
            field=side,
            allowed=sorted(job.registry.backends),
            remedy=f"give {side}=NAME",
        )
    job.registry.backend(name, key=side)
    return name
