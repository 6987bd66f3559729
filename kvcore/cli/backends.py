"""`kvcore backends`: every backend for this model, cache and device, usable or why not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcore.cli.commands import Command
from kvcore.cli.result import Job, Result
from kvcore.config.schema import FILLED, ServedRoot
from kvcore.spec.cache_spec import shown

if TYPE_CHECKING:
    from kvcore.models.facts import ModelFacts
    from kvcore.registry.select import ClassChoice


@dataclass(frozen=True)
class Keys(ServedRoot):
    """What a model's caches hold, and where; not how many."""

    UNUSED: ClassVar[frozenset[str]] = FILLED | {
        "cache.memory",
        "cache.num_blocks",
        "cache.utilization",
        "model.weight_bytes",
        "model.parameters",
        "device.memory_bytes",
        "engine.max_num_seqs",
        "engine.max_num_batched_tokens",
    }


COMMAND = Command("backends", "every attention backend for this model, cache and device: usable, or why not", Keys)


def execute(job: Job[Keys]) -> Result:
    """List; a name that is not installed is an error, one that cannot serve is an answer."""
    from kvcore.config.build import build
    from kvcore.engine.planning import select

    built = build(job.composed, job.registry, purpose="plan")
    selection = select(built.settings, job.registry, purpose="run", strict=False)
    device = built.settings.device
    document = {
        "model": built.model,
        "device": {"kind": device.kind, "name": device.name, "present": device.present},
        "dtype": built.settings.facts.dtype,
        "groups": [{**c.as_dict(), **_stored(c, built.settings.facts)} for c in selection.classes],
        "options": {name: asdict(options) for name, options in sorted(selection.given.items())},
        "passed_over": selection.passed_over,
        "notes": [*built.notes, *selection.notes],
    }
    lines = [f"{built.model} on {device.name or device.kind}"]
    for choice in selection.classes:
        lines += _shown(choice)
    lines += [f"note: {note}" for note in document["notes"]]
    return Result(document, "\n".join(lines))


def _stored(choice: ClassChoice, facts: ModelFacts) -> dict[str, object]:
    """What the backends of a class of caches were asked for: its type, its scales, its window."""
    query = facts.queries.get(choice.cache_ids[0])
    if query is None:
        return {}
    return {"cache_dtype": query.cache_dtype, "scales": query.quant, "window": query.mask.window}


def _shown(choice: ClassChoice) -> list[str]:
    count = len(choice.cache_ids)
    layers = shown(choice.cache_ids) + (f" ({count} layers)" if count > 1 else "")
    if choice.kind == "state":
        return [f"state {layers}: kept by the core, no attention backend"]
    asked = "" if choice.wanted is None else f", asked for by {choice.key}={choice.wanted}"
    lines = [f"{choice.kind} {layers}{asked}"]
    width = max((len(c.name) for c in choice.candidates), default=0)
    for candidate in choice.candidates:
        why = f"  {candidate.verdict.why}" if candidate.verdict.reason is not None else ""
        if candidate.verdict.proof != "device":
            why = f"  {candidate.verdict.proof}: a stand-in runs, not the device's kernels{why}"
        if candidate.status == "unsupported" and not candidate.verdict.installed_here:
            why += f"; missing here: {candidate.verdict.missing}"
        lines.append(f"  {candidate.name:{width}}  {candidate.status:11}{why}".rstrip())
    if choice.chosen is None:
        lines.append("  none can serve: run would refuse")
    return lines
