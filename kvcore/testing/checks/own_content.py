"""A plugin's content: that it agrees with itself, and that its blocks survive the core's byte copies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from kvcore.errors import KVCoreError
from kvcore.memory.block_table import BlockTables
from kvcore.memory.copy import copy_blocks
from kvcore.testing.cases.outcome import CheckFailure, Measure
from kvcore.testing.checks.attend import attend_once, judge_all
from kvcore.testing.checks.context import Context
from kvcore.testing.checks.guard import Guard
from kvcore.testing.checks.scene import Scene
from kvcore.testing.oracle import stored


def check_content(context: Context) -> Measure:
    """Fields as declared, and a way back from them, for tokens and heads of unlike size."""
    case = context.case
    content = case.content()
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.integers(-3, 4, (7, case.num_kv_heads, 1))
    dims = {"k": case.head_dim, "v": case.dim_v}
    values = {n: sizes * rng.standard_normal((7, case.num_kv_heads, d)) for n, d in dims.items()}
    try:
        problem = stored.content_problem(content, values)
    except KVCoreError as error:
        raise CheckFailure(str(error)) from error
    if problem:
        raise CheckFailure(f"content {content.kind}: {problem}")
    return Measure()


def check_copies(context: Context) -> Measure:
    """What `write` left, copied elsewhere as copy on write does, is what `attend` finds there."""
    scene = context.scene()
    metadata = [context.backend.prepare(scene.batch, group) for group in scene.groups()]
    for layer in scene.layers:
        cache = scene.views[layer.layer.cache_id]
        context.backend.write(layer.layer, scene.fresh(layer), cache, metadata[layer.group])
    before = [scene.fields_at(layer, scene.step_slots(layer.kv_group)) for layer in scene.layers]
    move_blocks(scene)
    for layer, was in zip(scene.layers, before, strict=True):
        now = scene.fields_at(layer, scene.step_slots(layer.kv_group))
        for name, field in was.items():
            if not torch.equal(field.contiguous().view(torch.uint8), now[name].contiguous().view(torch.uint8)):
                raise CheckFailure(f"field {name} of {layer.layer.cache_id} is lost when its blocks are copied")
    scene.batch = scene.build()
    metadata = [context.backend.prepare(scene.batch, group) for group in scene.groups()]
    guard, results = Guard(scene), []
    for layer in scene.layers:
        results.append(attend_once(context, scene, layer, layer.q, metadata[layer.group]))
    guard.unchanged("attend changed the cache")
    return judge_all(scene, results)


def move_blocks(scene: Scene) -> None:
    """Copy each block to another one and poison where it was, then point the tables at the copies."""
    case, config = scene.case, scene.config
    scene.tables = BlockTables(config, len(case.seqs) + 2, max(case.longest, 1), scene.target.device)
    for group in config.kv_cache_groups:
        taken = set().union(*scene.held)
        lowest = max(1, group.blocks_per_large_page)
        spare = next(b for b in range(lowest, group.num_blocks) if b not in taken)
        moved: dict[int, int] = {}
        for block in sorted(scene.held[group.index]):
            copy_blocks(scene.arena, config, group.index, [(block, spare)])
            for cache in group.cache_ids:
                for start, end in config.footprint(cache, block):
                    scene.arena.raw[start:end] = -1
            moved[block], spare = spare, block
        scene.held[group.index] = set(moved.values())
        size = group.block_size
        for row, slots in enumerate(scene.slots[group.index]):
            slots[:] = [j if j < 0 else moved[j // size] * size + j % size for j in slots]
            blocks = [slots[j] // size for j in range(0, len(slots), size)]
            first = sum(j < 0 for j in slots) // size
            scene.tables.apply(group.index, row, SimpleNamespace(drop_front=first, keep=0, ids=blocks[first:]))
