"""Attention against the oracle, with everything around it guarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcore.attention.batch import Batch
from kvcore.memory.dtypes import torch_dtype
from kvcore.testing.cases.outcome import CannotJudge, CheckFailure, Measure
from kvcore.testing.checks.context import Context
from kvcore.testing.checks.effect import hidden, without_each_feature
from kvcore.testing.checks.guard import Guard, Snapshot, given_snapshot, step_snapshot
from kvcore.testing.checks.scene import Scene
from kvcore.testing.checks.scene_layer import SceneLayer
from kvcore.testing.oracle.attention import Answer, Array
from kvcore.testing.oracle.tolerance import lse_tolerance, output_tolerance

GUARD_ROWS = 2
SENTINEL = -77.0


@dataclass
class Result:
    """What a backend wrote for one layer.

    Attributes:
        out: [T, H, Dv].
        lse: float32 [T, H], or None.
    """

    out: torch.Tensor
    lse: torch.Tensor | None

    def same_bits(self, other: Result) -> bool:
        """Whether outputs and log-sum-exps are equal bit for bit."""
        if self.lse is not None and other.lse is not None and not torch.equal(self.lse, other.lse):
            return False
        return torch.equal(self.out, other.out)


def check_attend(context: Context) -> Measure:
    """One step: prepare every group, then write and attend layer by layer.

    Raises:
        CannotJudge: The answer is right, and would be without something that the case is about.
    """
    scene = context.scene()
    measure = judge_all(scene, run_step(context, scene))
    # Random steps are right or wrong like all others, and prove no feature: some are too short to show it.
    unseen = [] if context.again or context.case.phase == "random" else hidden(scene)
    if unseen:
        raise CannotJudge(f"the case cannot show, around this base: {', '.join(unseen)}")
    return measure


def run_step(context: Context, scene: Scene, batch: Batch | None = None) -> list[Result]:
    """The whole step, as an engine runs it.

    Raises:
        CheckFailure: Something other than the results was touched.
    """
    batch = batch or scene.batch
    fused = scene.case.variant == "fused"
    step = step_snapshot(batch, [layer.layer for layer in scene.layers])
    metadata = [context.backend.prepare(batch, group) for group in scene.groups()]
    step.unchanged("prepare")
    guard, results = Guard(scene), []
    for layer in scene.layers:
        mine = metadata[layer.group]
        if not layer.layer.shared:
            tensors = scene.fresh(layer, fused=fused)
            given = given_snapshot(tensors)
            context.backend.write(layer.layer, tensors, scene.views[layer.layer.cache_id], mine)
            given.unchanged("write")
            step.unchanged("write")
            guard.written(layer, scene.step_slots(layer.kv_group))
        q = scene.fuse([layer.q, layer.q])[0] if fused else layer.q
        results.append(attend_once(context, scene, layer, q, mine))
        step.unchanged("attend")
        guard.unchanged("attend changed the cache")
    return results


def attend_once(context: Context, scene: Scene, layer: SceneLayer, q: torch.Tensor, metadata: Any) -> Result:
    """One call of `attend`, with rows around the results that must stay as they are."""
    tokens, heads, _ = q.shape
    device = q.device
    outs = torch.full((tokens + 2 * GUARD_ROWS, heads, layer.query.head_dim_v), SENTINEL, dtype=q.dtype, device=device)
    lses = torch.full((tokens + 2 * GUARD_ROWS, heads), SENTINEL, device=device)
    out, lse = outs[GUARD_ROWS:-GUARD_ROWS], lses[GUARD_ROWS:-GUARD_ROWS]
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    wants = layer.query.lse
    queries = Snapshot({"the queries": q})
    facts = _facts(out)
    answer: object = context.backend.attend(
        layer.layer, {"q": q}, scene.views[layer.layer.cache_id], metadata, out, lse if wants else None
    )
    if answer is not None:
        shown = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
        raise CheckFailure(f"attend returned {shown}; its result belongs into `out`")
    if _facts(out) != facts:
        raise CheckFailure(f"attend changed shape or dtype of `out`: {_facts(out)[:2]}, was {facts[:2]}")
    for buffer, name in ((outs, "out"), (lses, "lse")):
        around = torch.cat([buffer[:GUARD_ROWS], buffer[-GUARD_ROWS:]])
        if not bool((around == SENTINEL).all()):
            raise CheckFailure(f"attend wrote outside `{name}`")
    queries.unchanged("attend")
    return Result(out, lse if wants else None)


def _facts(out: torch.Tensor) -> tuple[object, ...]:
    return (tuple(out.shape), out.dtype, out.stride(), out.data_ptr())


def judge_all(scene: Scene, results: list[Result]) -> Measure:
    """Every layer against the oracle; the worst element of all."""
    worst = Measure()
    for layer, result in zip(scene.layers, results, strict=True):
        worst = worst.worse(judge(scene, layer, result))
    return worst


def judge(scene: Scene, layer: SceneLayer, result: Result) -> Measure:
    """One layer against the oracle; the step's own tokens count as the cache holds them, like all others."""
    measure, text = compare(layer, result, scene.answer(layer))
    if text:
        hint = _ignored(scene, layer, result)
        name = "" if len(scene.layers) == 1 else f"{layer.layer.cache_id}: "
        raise CheckFailure(name + text + hint, error=measure.error, tolerance=measure.tolerance)
    return measure


def compare(layer: SceneLayer, result: Result, answer: Answer) -> tuple[Measure, str]:
    """The worst element, and what is wrong with it ("" when nothing is)."""
    q, keys = layer.query, max(len(k) for k in layer.k)
    tolerance = output_tolerance(answer, q.dtype, q.head_dim, keys)
    measure, text = _worst("out", result.out.double().cpu().numpy(), answer.out_THV, tolerance)
    if not text and result.lse is not None:
        tolerance = lse_tolerance(answer, q.dtype, q.head_dim, keys)
        lse, text = _worst("lse", result.lse.double().cpu().numpy(), answer.lse_TH, tolerance)
        measure = measure.worse(lse) if not text else lse
    return measure, text


def _worst(name: str, got: Array, want: Array, tolerance: Array) -> tuple[Measure, str]:
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want))
    error = np.where(np.isnan(error), np.inf, error)
    if error.size == 0:
        return Measure(), ""
    ratio = np.divide(error, tolerance, out=np.where(error > 0, np.inf, 0.0), where=tolerance > 0)
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    measure = Measure(float(error[at]), float(tolerance[at]))
    if ratio[at] <= 1:
        return measure, ""
    axes = ", ".join(f"{n} {int(i)}" for n, i in zip(("token", "head", "dim"), at, strict=False))
    share = float((ratio > 1).mean())
    return measure, (
        f"{name} at {axes} is {got[at]:.6g}, the oracle says {want[at]:.6g} "
        f"(error {error[at]:.3g}, tolerance {tolerance[at]:.3g}; {share:.0%} of all elements are off)"
    )


def _ignored(scene: Scene, layer: SceneLayer, result: Result) -> str:
    """Whether the result is what it would be without one of the features."""
    for name, rules in without_each_feature(layer.rules(), layer.query.head_dim).items():
        if not compare(layer, result, scene.answer(layer, rules=rules))[1]:
            return f"; it is the answer without {name}: accepted and ignored"
    return ""


def empty_like(scene: Scene, layer: SceneLayer, rows: int) -> torch.Tensor:
    """Queries for padded rows."""
    shape = (rows, *layer.q.shape[1:])
    return torch.ones(shape, dtype=torch_dtype(layer.query.dtype), device=scene.target.device)
