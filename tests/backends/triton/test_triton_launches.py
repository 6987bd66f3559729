"""Launch code for shapes that no test could run: huge views, a million tokens, thousands of sequences."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from backends.triton.recording import Recorder, check_attend, check_merge, check_write
from kvcore_triton.backend import TritonBackend
from kvcore_triton.declaration import TritonOptions
from kvcore_triton.kernels import attention, write
from kvcore_triton.launches import max_partials
from kvcore_triton.targets import TARGETS
from kvcore_triton.variants import DIMS, DTYPES, FORMATS, GRANULARITIES, PROVEN

from kvcore.attention.backend import AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch, GroupBatch
from kvcore.attention.query import AttentionQuery, Mask
from kvcore.memory.dtypes import torch_dtype
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.layout import hnd, nhd

META = torch.device("meta")


def meta(array):
    return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=META)


def batch_of(scheduled, computed, block_size, columns):
    """A batch on the meta device; the host arrays are real."""
    scheduled, computed = (np.asarray(x, np.int32) for x in (scheduled, computed))
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    lens = computed + scheduled
    first = np.zeros_like(lens)
    counts = -(-lens // block_size)
    table = np.zeros((len(lens), columns), np.int32)
    tokens = int(starts[-1])
    slots = torch.empty(tokens, dtype=torch.int64, device=META)
    part = GroupBatch(block_size, meta(table), meta(counts), meta(first), meta(lens), slots, table, counts, first, lens)
    return Batch(
        meta(starts),
        meta(lens),
        meta(computed),
        starts,
        lens,
        computed,
        (part,),
        tokens,
        int((scheduled == 1).sum()),
        int(scheduled.max()),
        int(lens.max()),
        tokens,
        len(lens),
        tokens,
    )


def views(content, layout, size, blocks):
    """The fields of a packed cache of several layers: block strides wider than a page."""
    sized = layout.at(size)
    stride = 3 * sized.kernel_page_bytes
    found = {}
    for place in sized.places:
        dtype = torch_dtype(place.dtype)
        steps = [stride // dtype.itemsize, *(s // dtype.itemsize for s in place.strides)]
        found[place.name] = torch.empty_strided((blocks, *place.shape), steps, dtype=dtype, device=META)
    return found, sized


SHAPES = {
    "decode, 4,096 sequences": ([1] * 4096, [3000 + i for i in range(4096)], 16, 600_000),
    "one decode over a million tokens": ([1], [2**20 - 1], 16, 70_000),
    "a million tokens of prefill": ([2**20 - 5], [5], 128, 9_000),
    "mixed": ([1] * 300 + [7, 512, 33, 2], [900] * 300 + [0, 100, 4000, 31], 32, 100_000),
    # Numbers of items and merges that are no multiples of 4: the second pass starts within the list.
    "a short and a long pass": ([1, 1, 1, 77, 2], [900, 5000, 40_000, 9000, 3], 16, 100_000),
}


def backend_of(recorder, target="sm_90", **options):
    return TritonBackend("meta", TritonOptions(**options), target=TARGETS[target], processors=132, launcher=recorder)


def token_major(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device=META)


def head_major(tokens, heads, dim, *, dtype):
    """As transformers hands queries over: heads are the outer axis."""
    return torch.empty(heads, tokens, dim, dtype=dtype, device=META).transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [nhd, hnd])
@pytest.mark.parametrize(("dtype", "quant"), [("bfloat16", None), ("int8", "token_head"), ("fp8_e4m3", "head")])
def test_launches_stay_in_bounds(shape, layout, dtype, quant):
    launch_a_shape(shape, layout, dtype, quant)


def launch_a_shape(shape, layout, dtype, quant, made=token_major):
    scheduled, computed, size, blocks = SHAPES[shape]
    heads, kv_heads = 32, 8
    content = KVHeads(kv_heads, 128, dtype=dtype, quant=Quant(quant) if quant else None)
    cache, sized = views(content, layout(content), size, blocks)
    query = AttentionQuery(
        "kv",
        "bfloat16",
        dtype,
        heads,
        kv_heads,
        128,
        128,
        quant=quant,
        lse=True,
        mask=Mask(window=5000 if shape == "mixed" else None),
    )
    scales = torch.empty(kv_heads, device=META) if quant == "head" else None
    layer = AttentionLayer(CacheId(0), query, k_scale=scales, v_scale=scales)
    columns = -(-(max(c + s for c, s in zip(computed, scheduled, strict=True))) // size)
    batch = batch_of(scheduled, computed, size, columns)
    recorder = Recorder()
    backend = backend_of(recorder)
    plan = backend.prepare(batch, AttentionGroup(0, query, (layer,), sized))
    tokens = batch.num_tokens
    fresh = {n: made(tokens, kv_heads, 128, dtype=torch.bfloat16) for n in ("k", "v")}
    q = made(tokens, heads, 128, dtype=torch.bfloat16)
    backend.write(layer, fresh, cache, plan)
    backend.attend(layer, {"q": q}, cache, plan, torch.empty_like(q), torch.empty(tokens, heads, device=META))
    check_write(recorder.launches[0], tokens, kv_heads, blocks)
    staged = backend._buffers[0, query]._staging.host
    seen = np.zeros(tokens, np.int64)
    for one in plan.launches:
        items, merges = (
            staged[x.storage_offset() :][: x.numel()].reshape(x.shape).astype(np.int64) for x in (one.items, one.merges)
        )
        launch = next(x for x in recorder.launches if x[2].get("work_ptr") is one.items)
        check_attend(launch, items, tokens, heads, kv_heads, blocks)
        merged = [x for x in recorder.launches if x[2].get("merge_ptr") is one.merges]
        assert len(merged) == (len(merges) > 0)
        for merge in merged:
            check_merge(merge, launch[2], merges, items, tokens, heads, kv_heads)
        direct = items[items[:, 8] < 0]
        for rows in (direct[:, 1:3], merges[:, :2]):
            np.add.at(seen, np.concatenate([np.arange(a, a + n) for a, n in rows] or [[]]).astype(int), 1)
        assert merges[:, 3].sum() == (items[:, 8] >= 0).sum()
        # The splits of a tile follow one another and leave no key out.
        split = items[items[:, 8] >= 0]
        inner = np.flatnonzero((split[1:, 1] == split[:-1, 1]) & (split[1:, 0] == split[:-1, 0]))
        assert (split[inner + 1, 4] == split[inner, 5]).all()
    assert (seen == 1).all(), "every query is answered once"
    if shape == "one decode over a million tokens":
        (attend,) = (x for x in recorder.launches if x[0] is attention.attend_tiles)
        assert attend[1][0] * attend[1][1] >= 132, "one long sequence must fill the device"


def test_head_major_queries_and_values_of_a_million_tokens():
    """The offset of a head launches 2^31: the kernels' heads are 64 bits wide."""
    q = head_major(2**20, 32, 128, dtype=torch.bfloat16)
    assert q.stride(1) * 31 > 2**31
    shape = "a million tokens of prefill"
    launch_a_shape(shape, nhd, "bfloat16", None, head_major)


@pytest.mark.parametrize("target", PROVEN)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_what_is_launched_is_what_was_compiled(target, dims):
    """Types, constants and options of every launch are those of a variant; the recorder looks them up."""
    formats = [("same", None)] + [(d, g) for d in FORMATS[1:] for g in GRANULARITIES]
    for dtype in DTYPES:
        for stored, quant in formats:
            if stored.startswith("fp8") and stored not in TARGETS[target].fp8:
                continue
            for i, (heads, kv_heads) in enumerate(((1, 1), (12, 3), (40, 20), (64, 2))):
                launch_all(
                    target,
                    dtype,
                    dtype if stored == "same" else stored,
                    quant,
                    dims,
                    heads,
                    kv_heads,
                    general=i % 2 == 1,
                )


def launch_all(target, dtype, stored, quant, dims, heads, kv_heads, *, general):
    """A step with a short and a long pass; both are split."""
    content = KVHeads(kv_heads, *dims, dtype=stored, quant=Quant(quant) if quant else None)
    cache, sized = views(content, hnd(content) if general else nhd(content), 32, 5000)
    query = AttentionQuery("kv", dtype, stored, heads, kv_heads, *dims, quant=quant, softcap=30.0 if general else None)
    scale = {"tensor": torch.empty((), device=META), "head": torch.empty(kv_heads, device=META)}.get(quant)
    layer = AttentionLayer(CacheId(0), query, k_scale=scale, v_scale=scale)
    batch = batch_of([1, 40], [40_000, 40_000], 32, 2000)
    recorder = Recorder(target)
    backend = backend_of(recorder, target)
    plan = backend.prepare(batch, AttentionGroup(0, query, (layer,), sized))
    made = head_major if general else token_major
    element = getattr(torch, dtype)
    fresh = {n: made(41, kv_heads, d, dtype=element) for n, d in zip("kv", dims, strict=True)}
    backend.write(layer, fresh, cache, plan)
    out = token_major(41, heads, dims[1], dtype=element)
    backend.attend(layer, {"q": made(41, heads, dims[0], dtype=element)}, cache, plan, out)
    kinds = [kernel for kernel, *_ in recorder.launches]
    assert kinds[0] is write.write_step
    assert kinds.count(attention.attend_tiles) == len(plan.launches)
    assert attention.merge_splits in kinds


def test_the_workspace_never_moves():
    """What the first step takes serves taller tiles and other lengths too."""
    content = KVHeads(2, 64, dtype="bfloat16")
    cache, sized = views(content, nhd(content), 16, 50_000)
    query = AttentionQuery("kv", "bfloat16", "bfloat16", 8, 2, 64, 64)
    layer = AttentionLayer(CacheId(0), query)
    backend = backend_of(Recorder())
    rng, held = np.random.default_rng(3), None
    for step in range(40):
        n = int(rng.integers(1, 30))
        scheduled = [1] * n if step == 0 else rng.choice([1, 1, 3, 64, 500], n).tolist()
        batch = batch_of(scheduled, rng.integers(1, 200_000, n).tolist(), 16, 13_000)
        plan = backend.prepare(batch, AttentionGroup(0, query, (layer,), sized))
        for one in plan.launches:
            assert one.partials * 2 * one.tiles_per_head < max_partials(132)
        q = token_major(sum(scheduled), 8, 64, dtype=torch.bfloat16)
        backend.attend(layer, {"q": q}, cache, plan, torch.empty_like(q))
        held = backend._partials if held is None else held
        assert backend._partials is held


def test_a_view_of_more_than_2_31_elements():
    content = KVHeads(8, 128, dtype="bfloat16")
    cache, _ = views(content, nhd(content), 16, 70_000)
    assert cache["k"].stride(0) * (len(cache["k"]) - 1) > 2**31


@pytest.mark.parametrize("field", ["k_head", "q_token", "block_size", "group", "UNIT"])
def test_a_wrong_stride_is_noticed(field, monkeypatch):
    """The recorder can fail."""
    import kvcore_triton.backend as module

    run = module.TritonBackend._run
    monkeypatch.setattr(
        module.TritonBackend,
        "_run",
        lambda self, layer, one, args: run(self, layer, one, {**args, field: args[field] + 1}),
    )
    with pytest.raises(AssertionError):
        launch_a_shape("mixed", nhd, "bfloat16", None)


@pytest.mark.parametrize("column", range(4))
def test_a_wrong_merge_is_noticed(column, monkeypatch):
    import kvcore_triton.launches as module

    listed = module.schedule_tiles

    def wrong(*args):
        work = listed(*args)
        work.merges[-1:, column] += 1
        return work

    monkeypatch.setattr(module, "schedule_tiles", wrong)
    with pytest.raises(AssertionError):
        launch_a_shape("one decode over a million tokens", nhd, "bfloat16", None)


def test_an_array_that_does_not_start_at_16_bytes_is_noticed(monkeypatch):
    import kvcore_triton.launches as module

    monkeypatch.setattr(module, "_padded", lambda size: size)
    with pytest.raises(AssertionError, match=r"(work|merge)_ptr"):
        launch_a_shape("a short and a long pass", nhd, "bfloat16", None)
