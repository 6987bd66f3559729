"""Levels 4 and 5: merges by log-sum-exp, capture in a graph, bits that repeat."""

from __future__ import annotations

import numpy as np
import torch

from kvcore.testing.cases.outcome import CannotJudge, CheckFailure, Measure, Refused
from kvcore.testing.checks.attend import Result, attend_once, compare, judge_all, run_step
from kvcore.testing.checks.context import Context
from kvcore.testing.oracle.attention import attention, merge
from kvcore.testing.oracle.tolerance import lse_tolerance, output_tolerance


def check_merge(context: Context) -> Measure:
    """One query over two sets of keys, merged by their log-sum-exps, is the query over all of them."""
    scene = context.scene()
    layer = scene.layers[0]
    layer.q = layer.q[:1].repeat(len(scene.case.seqs), 1, 1)
    result = run_step(context, scene)[0]
    if result.lse is None:
        raise CheckFailure("the case asks for a log-sum-exp")
    out, lse = result.out.double().cpu().numpy(), result.lse.double().cpu().numpy()
    merged_out, merged_lse = merge([(out[i], lse[i]) for i in range(len(out))])
    keys, values = (np.concatenate(parts) for parts in scene.numbers(layer))
    whole = attention(layer.rules(), layer.q[:1].double().cpu().numpy(), [keys], [values], [len(keys) - 1], [1])
    q = layer.query
    # Each part may be off by its own tolerance, and its weight by the error of its log-sum-exp.
    slack = lse_tolerance(whole, q.dtype, q.head_dim, len(keys))
    allowed = (
        output_tolerance(whole, q.dtype, q.head_dim, len(keys)) + 2 * slack[..., None] * whole.condition.weight_THV
    )
    error = np.abs(merged_out - whole.out_THV[0])
    ratio = error / allowed[0]
    at = np.unravel_index(int(np.nanargmax(ratio)), ratio.shape)
    measure = Measure(float(error[at]), float(allowed[0][at]))
    lse_error = np.abs(merged_lse - whole.lse_TH[0])
    if not bool((ratio <= 1).all()) or not bool((lse_error <= 2 * slack[0]).all()):
        raise CheckFailure(
            f"parts merged by their log-sum-exps are not the whole: off by {np.nanmax(error):.3g}, "
            f"log-sum-exp by {np.nanmax(lse_error):.3g}; is it natural, and after the scale?",
            error=measure.error,
            tolerance=measure.tolerance,
        )
    return measure


def check_capture(context: Context) -> Measure:
    """A captured step, replayed with other queries, gives the answer to those."""
    spec = context.target.spec
    if not spec.graph_capture:
        raise Refused("graph_capture", True, False)
    if context.target.device != "cuda":
        raise CannotJudge("graphs are captured on CUDA devices; there is none here")
    scene = context.scene()
    run_step(context, scene)
    metadata = [context.backend.prepare(scene.batch, group) for group in scene.groups()]
    layer = scene.layers[0]
    q = layer.q.clone()
    out = torch.empty((*q.shape[:2], layer.query.head_dim_v), dtype=q.dtype, device=q.device)
    cache = scene.views[layer.layer.cache_id]
    context.backend.attend(layer.layer, {"q": q}, cache, metadata[0], out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context.backend.attend(layer.layer, {"q": q}, cache, metadata[0], out)
    q.copy_(layer.q.flip(0))
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    layer.q = q
    measure, text = compare(layer, Result(out, None), scene.answer(layer))
    if text:
        raise CheckFailure(f"replayed with other queries: {text}", error=measure.error, tolerance=measure.tolerance)
    return measure


def check_deterministic(context: Context) -> Measure:
    """The same step twice gives the same bits."""
    if not context.target.spec.deterministic:
        raise Refused("deterministic", True, False)
    found = []
    for _ in range(3):
        scene = context.scene()
        found.append(run_step(context, scene))
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            if not a.same_bits(b):
                raise CheckFailure("declared deterministic, but equal input gave other bits")
    return judge_all(scene, found[-1])


def check_batch_invariant(context: Context) -> Measure:
    """Each sequence alone gives the bits that it gives among others."""
    if not context.target.spec.batch_invariant:
        raise Refused("batch_invariant", True, False)
    scene = context.scene()
    together = run_step(context, scene)
    measure, start = judge_all(scene, together), 0
    for row, seq in enumerate(scene.case.seqs):
        rows = slice(start, start + seq.scheduled)
        start += seq.scheduled
        alone = scene.builder.build([row], [seq.scheduled], [seq.computed], scene.tables)
        for layer, result in zip(scene.layers, together, strict=True):
            groups = scene.groups()
            metadata = context.backend.prepare(alone, groups[layer.group])
            fresh = {n: t[rows].contiguous() for n, t in scene.fresh(layer).items()}
            context.backend.write(layer.layer, fresh, scene.views[layer.layer.cache_id], metadata)
            got = attend_once(context, scene, layer, layer.q[rows].contiguous(), metadata)
            among = Result(result.out[rows], None if result.lse is None else result.lse[rows])
            if not got.same_bits(among):
                raise CheckFailure(f"declared batch-invariant, but sequence {row} alone gives other bits")
    return measure
