"""Level 3: placement, empty rows, offsets beyond 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvcore.attention.batch import Batch, GroupBatch
from kvcore.testing.cases.outcome import CheckFailure, Measure
from kvcore.testing.checks.attend import Result, attend_once, compare, empty_like, judge_all, run_step
from kvcore.testing.checks.context import Context
from kvcore.testing.checks.guard import Guard
from kvcore.testing.checks.scene import Scene
from kvcore.testing.checks.scene_layer import SceneLayer

# A view must span more elements than an int32 can count.
LARGE_VIEW = 2**31 + 2**27


def check_placement(context: Context) -> Measure:
    """The same step with its blocks elsewhere: right both times, and bit for bit where that is declared."""
    worst, found = Measure(), []
    for seed in (0, 1):
        scene = context.scene(seed=seed)
        results = run_step(context, scene)
        worst = worst.worse(judge_all(scene, results))
        found.append(results)
    if context.target.spec.deterministic:
        for a, b in zip(*found, strict=True):
            if not a.same_bits(b):
                raise CheckFailure("declared deterministic, but other block ids give other bits")
    return worst


def check_padded(context: Context) -> Measure:
    """Two rows more than there are sequences, as a captured graph has them: no keys, slot -1, output 0."""
    scene, extra = context.scene(), 2
    batch = pad(scene.batch, extra)
    metadata = [context.backend.prepare(batch, group) for group in scene.groups()]
    worst = Measure()
    for layer in scene.layers:
        fresh = {n: torch.cat([t, torch.ones_like(t[:extra])]) for n, t in scene.fresh(layer).items()}
        before = scene.memory().copy()
        context.backend.write(layer.layer, fresh, scene.views[layer.layer.cache_id], metadata[layer.group])
        _null_block_is_zero(scene, before)
        q = torch.cat([layer.q, empty_like(scene, layer, extra)])
        guard = Guard(scene)
        result = attend_once(context, scene, layer, q, metadata[layer.group])
        guard.unchanged("attend changed the cache")
        _rows_without_keys(result, extra)
        cut = Result(result.out[:-extra], None if result.lse is None else result.lse[:-extra])
        worst = worst.worse(_judge(scene, layer, cut))
    return worst


def _judge(scene: Scene, layer: SceneLayer, result: Result) -> Measure:
    measure, text = compare(layer, result, scene.answer(layer))
    if text:
        raise CheckFailure(text, error=measure.error, tolerance=measure.tolerance)
    return measure


def _rows_without_keys(result: Result, extra: int) -> None:
    if not bool((result.out[-extra:] == 0).all()):
        raise CheckFailure(f"a row that sees no key must give 0, not {result.out[-extra:].flatten()[0]:.6g}")
    if result.lse is not None and not bool((result.lse[-extra:] == -torch.inf).all()):
        got = result.lse[-extra:].flatten()[0]
        raise CheckFailure(f"a row that sees no key must give log-sum-exp -inf, not {got:.6g}")


def _null_block_is_zero(scene: Scene, before: np.typing.NDArray[np.uint8]) -> None:
    now = scene.memory()
    for group in scene.config.kv_cache_groups:
        for null in range(max(1, group.blocks_per_large_page)):
            for cache in group.cache_ids:
                for start, end in scene.config.footprint(cache, null):
                    if not np.array_equal(now[start:end], before[start:end]):
                        raise CheckFailure("a token with slot -1 was written to the null block")


def pad(batch: Batch, extra: int) -> Batch:
    """The batch with `extra` decode rows that hold no token: lengths 0, table 0, slot -1."""
    starts = batch.query_start_loc_host
    tail = starts[-1] + np.arange(1, extra + 1, dtype=np.int32)
    zeros = np.zeros(extra, np.int32)
    loc = np.concatenate([starts, tail]).astype(np.int32)
    lens, done = (np.concatenate([x, zeros]) for x in (batch.seq_lens_host, batch.num_computed_host))
    device = batch.seq_lens.device
    return replace(
        batch,
        query_start_loc=torch.from_numpy(loc).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        num_computed=torch.from_numpy(done).to(device),
        query_start_loc_host=loc,
        seq_lens_host=lens,
        num_computed_host=done,
        groups=[_pad_group(g, extra) for g in batch.groups],
        num_tokens=batch.num_tokens + extra,
        num_decodes=batch.num_decodes + extra,
        padded_tokens=batch.padded_tokens + extra,
    )


def _pad_group(group: GroupBatch, extra: int) -> GroupBatch:
    zeros = np.zeros(extra, np.int32)
    table, counts, first, lens = (
        np.concatenate([x, np.zeros((extra, *x.shape[1:]), np.int32)])
        for x in (group.block_table_host, group.counts_host, group.first_block_host, group.kv_lens_host)
    )
    device = group.counts.device
    slots = torch.full((len(zeros),), -1, dtype=torch.int64, device=device)
    return GroupBatch(
        kernel_block_size=group.kernel_block_size,
        block_table_SN=torch.from_numpy(table).to(device),
        counts=torch.from_numpy(counts).to(device),
        first_block=torch.from_numpy(first).to(device),
        kv_lens=torch.from_numpy(lens).to(device),
        slot_mapping_T=torch.cat([group.slot_mapping_T, slots]),
        block_table_host=table,
        counts_host=counts,
        first_block_host=first,
        kv_lens_host=lens,
    )


def check_offsets(context: Context) -> Measure:
    """Blocks at both ends of a view that spans more elements than an int32 counts."""
    scene = context.scene(elements=LARGE_VIEW)
    return judge_all(scene, run_step(context, scene))
