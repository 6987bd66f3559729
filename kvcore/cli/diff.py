"""`kvcore diff`: one batch, or a whole model, through two backends: where they part first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcore.cli.commands import Command
from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.schema import GeneratingKeys, ModelRoot, check_samples
from kvcore.errors import ConfigError
from kvcore.models.stored_as import known_kind
from kvcore.settings.key import key

if TYPE_CHECKING:
    from kvcore.engine.settings import EngineSettings

# What acts on a case of the kit; the rest is of a whole model.
OF_A_CASE = ("a", "b", "case", "cache.content", "device", "output")


@dataclass(frozen=True)
class Keys(GeneratingKeys, ModelRoot):
    """Two backends, and a model or a case."""

    a: str | None = key(None, "backend of one side")
    b: str | None = key(None, "backend of the other side")
    case: str | None = key(None, "case of the conformance kit; without it, a whole model")
    prompts: str | None = key(None, "UTF-8 file of prompts, one a line, empty lines skipped")

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat", self.chat.lower())
        super().__post_init__()
        check_samples(self.sampling, self.engine)


def quoted(overrides: Sequence[str]) -> list[str]:
    """The overrides with the value of ``case=`` quoted: ids of cases hold signs of Hydra's grammar."""
    found = []
    for text in overrides:
        name, _, value = text.partition("=")
        plain = name == "case" and value[:1] not in ("'", '"') and "'" not in value
        found.append(f"case='{value}'" if plain and value else text)
    return found


COMMAND = Command(
    "diff",
    "one batch, or a whole model, through two backends: where they part first",
    Keys,
    usage="a=NAME b=NAME [case=ID | --prompt TEXT ...] [KEY=VALUE ...] [-m]",
    prompts=True,
    rewrite=quoted,
)


def execute(job: Job[Keys]) -> Result:
    """Compare; status 1 when they part."""
    from kvcore.cli.progress import Display
    from kvcore.cli.prompts import gather
    from kvcore.config.build import build, device_of

    config = job.composed.config
    a, b = (_name(job, side) for side in ("a", "b"))
    if config.case is not None:
        what = config.case
        idle = sorted(k for k in job.composed.given if k not in OF_A_CASE and not k.startswith(("backends", "device.")))
        if job.prompts or idle:
            raise ConfigError(
                "a case of the kit has neither model nor prompts",
                field="case",
                got=[what, *idle],
                allowed=[*OF_A_CASE, "backends.*"],
            )
        from kvcore.diff.case import diff_case  # late: loads torch

        facts = device_of(job.composed, present=True)
        specs = [job.registry.backend(name) for name in (a, b)]
        content = known_kind("cache.content", config.cache.content, job.registry.contents)
        divergence = diff_case(what, specs, config.backends, facts, content=content)
    else:
        prompts = gather(job.prompts, config.prompts)
        with Display() as display:
            built = build(job.composed, job.registry, purpose="run", progress=display.fraction)
            display.stage("importing torch and transformers")
            from kvcore.diff.model import diff_model  # late: loads torch

            job.registry.configure(config.plugins)
            divergence = diff_model(
                built.settings,
                (a, b),
                job.registry,
                prompts,
                config.sampling,
                chat=built.chat,
                plain=_without_content(job),
                progress=display.stage,
            )
        what = f"{built.model}, {len(prompts)} prompts"
    document = {"a": a, "b": b, "what": what, "stored": divergence.stored, **divergence.as_dict()}
    if divergence.stored is not None:
        what += f" ({a} stores {divergence.stored[0]}, {b} {divergence.stored[1]})"
    largest = f"{divergence.compared} outputs compared, largest difference {divergence.max_abs_error:.3g}"
    if divergence.first is None:
        return Result(document, f"{a} and {b} agree on {what}: {largest}", DONE)
    at = divergence.first
    text = (
        f"{a} and {b} part on {what}, first at layer {at.layer}, token {at.token}, head {at.head} "
        f"(sequence {at.sequence}, step {at.step}): by {divergence.first_error:.3g}, "
        f"tolerance {divergence.first_tolerance:.3g}; {largest}"
    )
    return Result(document, text, NO)


def _without_content(job: Job[Keys]) -> EngineSettings | None:
    """The settings without `cache.content`, where it asks for a plugin's."""
    from kvcore.config.build import build

    config = job.composed.config
    if config.cache.content == "auto":
        return None
    plain = replace(config, cache=replace(config.cache, content="auto"))
    return build(replace(job.composed, config=plain), job.registry, purpose="run").settings


def _name(job: Job[Keys], side: str) -> str:
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
