"""Level 3: steps that follow one another on one instance of the backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcore.testing.cases.outcome import CheckFailure, Measure
from kvcore.testing.cases.walk import Part, pieces
from kvcore.testing.checks.attend import Result, attend_once, judge_all, run_step
from kvcore.testing.checks.context import Context
from kvcore.testing.checks.guard import Guard
from kvcore.testing.checks.scene import Scene


def check_walk(context: Context) -> Measure:
    """The tokens of the case in many steps of unlike shape; causal masks alone, so that the answer is that of one step.

    What is judged at the end are the outputs of all steps; steps that went wrong are told by their tokens.
    """
    scene = context.scene()
    tokens = scene.case.tokens
    found: list[Result] = []
    for layer in scene.layers:
        shape = (tokens, layer.query.num_heads, layer.query.head_dim_v)
        out = torch.full(shape, torch.nan, dtype=layer.q.dtype, device=layer.q.device)
        lse = torch.full(shape[:2], torch.nan, device=layer.q.device) if layer.query.lse else None
        found.append(Result(out, lse))
    guard = Guard(scene)
    for step in pieces(scene.case.seqs):
        rows = _flat_rows(scene, step)
        for whole, part in zip(found, run_parts(context, scene, step, guard), strict=True):
            whole.out[rows] = part.out
            if whole.lse is not None and part.lse is not None:
                whole.lse[rows] = part.lse
    return judge_all(scene, found)


def run_parts(context: Context, scene: Scene, step: Sequence[Part], guard: Guard) -> list[Result]:
    """A step that takes some tokens of some sequences, layer by layer; nothing but their slots may change."""
    batch = scene.builder.build(
        [p.row for p in step], [p.scheduled for p in step], [p.computed for p in step], scene.tables
    )
    metadata = [context.backend.prepare(batch, group) for group in scene.groups()]
    rows = _flat_rows(scene, step)
    found = []
    for layer in scene.layers:
        fresh = {name: t[rows].contiguous() for name, t in scene.fresh(layer).items()}
        context.backend.write(layer.layer, fresh, scene.views[layer.layer.cache_id], metadata[layer.group])
        slots = batch.groups[layer.kv_group].slot_mapping_T.tolist()
        guard.written(layer, [slot for slot in slots if slot >= 0])
        found.append(attend_once(context, scene, layer, layer.q[rows].contiguous(), metadata[layer.group]))
    return found


def _flat_rows(scene: Scene, step: Sequence[Part]) -> list[int]:
    """Where the tokens of a step lie among all tokens of the case."""
    seqs = scene.case.seqs
    starts = np.concatenate([[0], np.cumsum([s.scheduled for s in seqs])])
    return [int(starts[p.row]) + p.computed - seqs[p.row].computed + i for p in step for i in range(p.scheduled)]


def check_twice(context: Context) -> Measure:
    """The same step twice on the same cache: right both times, and bit for bit where that is declared."""
    scene = context.scene()
    first = run_step(context, scene)
    worst = judge_all(scene, first)
    scene.batch = scene.build()
    second = run_step(context, scene)
    if context.target.spec.deterministic and not all(a.same_bits(b) for a, b in zip(first, second, strict=True)):
        raise CheckFailure("declared deterministic, but the same step again gives other bits")
    return worst.worse(judge_all(scene, second))


def check_steps(context: Context) -> Measure:
    """A step of other lengths first, with the same backend, tables and buffers; then the case's own step."""
    scene = context.scene()
    rows = [i for i, s in enumerate(scene.case.seqs) if s.computed > 1]
    rows = rows[::-1]
    earlier = scene.builder.build(rows, [1] * len(rows), [scene.case.seqs[i].computed - 1 for i in rows], scene.tables)
    metadata = [context.backend.prepare(earlier, group) for group in scene.groups()]
    for layer in scene.layers:
        # The tokens before the step once more, with the numbers that lie there already.
        fresh = {
            name: torch.from_numpy(np.stack([x[i][scene.case.seqs[i].computed - 1] for i in rows]))
            .to(layer.q.dtype)
            .to(scene.target.device)
            for name, x in (("k", layer.k), ("v", layer.v))
        }
        cache = scene.views[layer.layer.cache_id]
        context.backend.write(layer.layer, fresh, cache, metadata[layer.group])
        attend_once(context, scene, layer, layer.q[: len(rows)].contiguous(), metadata[layer.group])
    scene.batch = scene.build()
    return judge_all(scene, run_step(context, scene))
