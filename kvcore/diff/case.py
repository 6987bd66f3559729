"""One case of the kit through two backends, on the same cache content."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.diff.divergence import Divergence, OutputRow, as_array
from kvcore.errors import BackendError, BackendUnavailableError, BackendUnsupportedError, ConfigError
from kvcore.spec.content import Content
from kvcore.testing.cases.answers import raised
from kvcore.testing.cases.base import content_refused, find_base, here, switch_on
from kvcore.testing.cases.case import Base, Case
from kvcore.testing.cases.catalogue import all_cases
from kvcore.testing.cases.outcome import CheckFailure, Refused
from kvcore.testing.cases.planning import Target
from kvcore.testing.checks.attend import Result, run_step
from kvcore.testing.checks.context import Context, Instance
from kvcore.testing.checks.scene import Scene
from kvcore.testing.oracle.tolerance import output_tolerance


def diff_case(
    case_id: str,
    specs: Sequence[type[BackendSpec]],
    options: Mapping[str, Any],
    facts: DeviceFacts | None = None,
    *,
    content: type[Content] | None = None,
) -> Divergence:
    """Where two backends part on one step of the kit.

    Both may err by the kit's tolerance, so the sum of two is allowed between them.

    Args:
        case_id: Id of a case that attends, such as ``L2.attend.base.mixed``.
        specs: The two declarations.
        options: Options by backend name; defaults where one is missing.
        facts: The device; None is the one of this machine.
        content: A plugin's content; a side that does not take it stores plain keys and values.

    Raises:
        ConfigError: There is no such case, or it stores what the content cannot stand in for.
        BackendError: One of them cannot serve the case, cannot run here, or fails in it.
    """
    device = facts or here()
    targets = [_target(spec, options, device, content) for spec in specs]
    if content is not None and all(target.content is None for target in targets):
        raise BackendUnsupportedError(
            "neither backend takes this content", field="cache.content", got=content.kind, allowed="auto"
        )
    case = _case(case_id, _common_base(targets))
    cases = [_over(case, target.content) for target in targets]
    (scene, first), (_, second) = (_run(c, target) for c, target in zip(cases, targets, strict=True))
    divergence = Divergence(stored=None if content is None else (cases[0].kind, cases[1].kind))
    rows = [(s, seq.computed + i) for s, seq in enumerate(case.seqs) for i in range(seq.scheduled)]
    for layer, a, b in zip(scene.layers, first, second, strict=True):
        q = layer.query
        tolerance = 2 * output_tolerance(scene.answer(layer), q.dtype, q.head_dim, case.longest)

        def locate(row: int, head: int, number: int = layer.layer.cache_id.layer) -> OutputRow:
            return OutputRow(number, rows[row][1], head, rows[row][0], 1)

        divergence.take(as_array(a.out), as_array(b.out), tolerance, locate)
    return divergence


def _over(case: Case, content: type[Content] | None) -> Case:
    stored = case.storing(content)
    if stored is None:
        raise ConfigError(
            f"{case.id} stores what this content cannot stand in for",
            field="cache.content",
            got=content and content.kind,
            allowed="auto",
        )
    return stored


def _target(
    spec: type[BackendSpec], options: Mapping[str, Any], device: DeviceFacts, content: type[Content] | None
) -> Target:
    target, missing = switch_on(spec, options.get(spec.name, spec.Config()), device)
    if missing is not None:
        raise BackendUnavailableError(
            f"backend {spec.name} cannot run on this machine: {missing}", field="backend", got=spec.name
        )
    over = replace(target, content=content)
    return target if content is None or content_refused(over) is not None else over


def _common_base(targets: Sequence[Target]) -> Base:
    """The plainest problem of the first, in blocks that are large enough for both."""
    bases = [find_base(target) for target in targets]
    return bases[0]._replace(block_size=max(b.block_size for b in bases))


def _case(case_id: str, base: Base) -> Case:
    known = {c.id: c for c in all_cases("full", base) if c.check == "attend"}
    if case_id not in known:
        near = difflib.get_close_matches(case_id, known, 5) or list(known)[:5]
        raise ConfigError(
            f"the kit has no case {case_id} that attends",
            field="case",
            got=case_id,
            allowed=near,
            remedy="`kvcore conform output=json` lists the ids of all cases",
        )
    return known[case_id]


def _run(case: Case, target: Target) -> tuple[Scene, list[Result]]:
    name = target.spec.name
    for asked in case.asked():
        refused = target.spec.unsupported(asked.query(), target.options)
        if refused is not None:
            raise BackendUnsupportedError.of(refused, f"backend {name} does not serve {case.id}")
    context = Context(case, Instance(target))
    try:
        with torch.inference_mode():
            scene = context.scene()
            return scene, run_step(context, scene)
    except Refused as refused:
        raise BackendUnsupportedError.of(refused.refusal, f"backend {name} does not serve {case.id}") from refused
    except CheckFailure as failure:
        raise BackendError(f"backend {name} fails {case.id}: {failure}", field="backend", got=name) from failure
    except Exception as error:  # a kernel may raise anything
        raise BackendError(f"backend {name} raised in {case.id}: {raised(error)}", field="backend", got=name) from error
