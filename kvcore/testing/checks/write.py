"""Level 1: what a write leaves in memory."""

from __future__ import annotations

import numpy as np
import torch

from kvcore.attention.batch import Batch
from kvcore.testing.cases.outcome import CheckFailure, Measure
from kvcore.testing.checks.context import Context
from kvcore.testing.checks.guard import Guard, given_snapshot, step_snapshot
from kvcore.testing.checks.scene import Scene
from kvcore.testing.checks.scene_layer import SceneLayer
from kvcore.testing.oracle import quant, stored
from kvcore.testing.oracle.attention import Array

Tensors = dict[str, torch.Tensor]


def check_write(context: Context) -> Measure:
    """Every layer's tokens, bit by bit, and every other byte of the arena as it was."""
    scene, variant = context.scene(), context.case.variant
    if variant in ("zeros", "saturate"):
        _reshape_data(scene, variant)
    if variant == "chunks":
        _in_pieces(context, scene)
        return Measure()
    batch = scene.batch
    skipped = _skip_tokens(batch, variant)
    guard, step = Guard(scene), step_snapshot(batch, [layer.layer for layer in scene.layers])
    metadata = [context.backend.prepare(batch, group) for group in scene.groups()]
    guard.unchanged("prepare changed the cache")
    for layer in scene.layers:
        fresh = scene.fresh(layer, fused=variant == "fused")
        if variant == "repeat":
            first = {name: t.flip(0).contiguous() for name, t in fresh.items()}
            _write(context, scene, layer, first, batch, metadata, guard, skipped)
        _write(context, scene, layer, fresh, batch, metadata, guard, skipped)
    step.unchanged("prepare or write")
    return Measure()


def _write(
    context: Context,
    scene: Scene,
    layer: SceneLayer,
    fresh: Tensors,
    batch: Batch,
    metadata: list[object],
    guard: Guard,
    skipped: set[int],
) -> None:
    given = given_snapshot(fresh)
    cache = scene.views[layer.layer.cache_id]
    context.backend.write(layer.layer, fresh, cache, metadata[layer.group])
    given.unchanged("write")
    slots = scene.step_slots(layer.kv_group)
    rows = [t for t in range(len(slots)) if t not in skipped]
    guard.written(layer, [slots[t] for t in rows])
    _read_back(scene, layer, {n: t.double().cpu().numpy() for n, t in fresh.items()}, slots, rows)


def _read_back(scene: Scene, layer: SceneLayer, values: dict[str, Array], slots: list[int], rows: list[int]) -> None:
    if not rows:
        return
    given = {name: _heads(x[rows]) for name, x in values.items()}
    found = scene.fields_at(layer, [slots[t] for t in rows])
    problem = stored.write_problem(layer.content, given, found, layer.scales)
    if problem:
        raise CheckFailure(f"{layer.layer.cache_id}: {problem}{_where(layer, given, found, rows, slots)}")


def _heads(values: Array) -> Array:
    """[n, K, D]; a latent is one head."""
    return values[:, None] if values.ndim == 2 else values


def _where(layer: SceneLayer, given: dict[str, Array], found: Tensors, rows: list[int], slots: list[int]) -> str:
    """The first token that is not as it should be, where there is one right answer."""
    if layer.rounds_freely:
        return ""
    want = stored.encode(layer.content, given, layer.scales)
    for i, t in enumerate(rows):
        if not all(torch.equal(x[i].double(), found[name][i].double()) for name, x in want.items()):
            return f" (token {t}, slot {slots[t]})"
    return ""


def _skip_tokens(batch: Batch, variant: str) -> set[int]:
    """Tokens whose slot is made -1, in place, before the backend sees the batch."""
    if variant not in ("padding", "all_padding"):
        return set()
    skipped = set(range(batch.num_tokens) if variant == "all_padding" else range(0, batch.num_tokens, 3))
    for group in batch.groups:
        group.slot_mapping_T[sorted(skipped)] = -1
    return skipped


def _in_pieces(context: Context, scene: Scene) -> None:
    """The same tokens in two steps; what the first left must survive the second."""
    seqs, tokens = scene.case.seqs, [0] * len(scene.case.seqs)
    halves = [[(s.scheduled + 1) // 2 for s in seqs], [s.scheduled // 2 for s in seqs]]
    starts = np.concatenate([[0], np.cumsum([s.scheduled for s in seqs])])
    for counts in halves:
        rows = [i for i, n in enumerate(counts) if n]
        batch = scene.builder.build(
            rows, [counts[i] for i in rows], [seqs[i].computed + tokens[i] for i in rows], scene.tables
        )
        guard = Guard(scene)
        metadata = [context.backend.prepare(batch, group) for group in scene.groups()]
        picked = [int(starts[i]) + tokens[i] + j for i in rows for j in range(counts[i])]
        for layer in scene.layers:
            fresh = {n: t[picked].contiguous() for n, t in scene.fresh(layer).items()}
            cache = scene.views[layer.layer.cache_id]
            context.backend.write(layer.layer, fresh, cache, metadata[layer.group])
            guard.written(layer, [scene.step_slots(layer.kv_group)[t] for t in picked])
        tokens = [done + n for done, n in zip(tokens, counts, strict=True)]
    for layer in scene.layers:
        values = {n: t.double().cpu().numpy() for n, t in scene.fresh(layer).items()}
        slots = scene.step_slots(layer.kv_group)
        _read_back(scene, layer, values, slots, list(range(len(slots))))


def _beyond(layer: SceneLayer, name: str) -> float:
    """A factor after which half of all plain normal numbers lie beyond what codes and the layer's scale can hold."""
    scale = layer.scales.get(name)
    if layer.query.quant is None or scale is None:
        return 4096.0  # a scale a token follows whatever is written
    return float(1.5 * quant.top(layer.query.cache_dtype) * np.max(scale))


def _reshape_data(scene: Scene, variant: str) -> None:
    """A token of zeros, or values beyond what the format can hold."""
    for layer in scene.layers:
        for name, dense in (("k", layer.k), ("v", layer.v)):
            for x, seq in zip(dense, scene.case.seqs, strict=True):
                if variant == "zeros":
                    x[seq.computed] = 0
                else:
                    x[seq.computed :] *= _beyond(layer, name)
