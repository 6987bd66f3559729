"""Launch code for shapes that no test could run: huge views, a million tokens, thousands of sequences."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from backends.triton.recording import Recorder, check_attend, check_write
from kvcore_triton.backend import TritonBackend
from kvcore_triton.kernels import attention
from kvcore_triton.spec import TritonOptions
from kvcore_triton.targets import TARGETS

from kvcore.attention.backend import AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch, GroupBatch
from kvcore.attention.query import AttentionQuery, Mask
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
    part = GroupBatch(block_size, meta(table), meta(counts), meta(first), meta(lens), slots,
                      table, counts, first, lens)  # fmt: skip
    return Batch(meta(starts), meta(lens), meta(computed), starts, lens, computed, (part,), tokens,
                 int((scheduled == 1).sum()), int(scheduled.max()), int(lens.max()), tokens, len(lens),
                 tokens)  # fmt: skip


def views(content, layout, size, blocks):
    """The fields of a packed cache of several layers: block strides wider than a page."""
    sized = layout.at(size)
    stride = 3 * sized.kernel_page_bytes
    found = {}
    for place in sized.places:
        dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn"}.get(place.dtype, place.dtype))
        steps = [stride // dtype.itemsize, *(s // dtype.itemsize for s in place.strides)]
        found[place.name] = torch.empty_strided((blocks, *place.shape), steps, dtype=dtype, device=META)
    return found, sized


SHAPES = {
    "decode, 4,096 sequences": ([1] * 4096, [3000 + i for i in range(4096)], 16, 600_000),
    "one decode over a million tokens": ([1], [2**20 - 1], 16, 70_000),
    "a million tokens of prefill": ([2**20 - 5], [5], 128, 9_000),
    "mixed": ([1] * 300 + [7, 512, 33, 2], [900] * 300 + [0, 100, 4000, 31], 32, 100_000),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [nhd, hnd])
@pytest.mark.parametrize(
    ("dtype", "quant"), [("bfloat16", None), ("int8", "token_head"), ("fp8_e4m3", "head")]
)
def test_launches_stay_in_bounds(shape, layout, dtype, quant):
    scheduled, computed, size, blocks = SHAPES[shape]
    heads, kv_heads = 32, 8
    content = KVHeads(kv_heads, 128, dtype=dtype, quant=Quant(quant) if quant else None)
    cache, sized = views(content, layout(content), size, blocks)
    query = AttentionQuery("kv", "bfloat16", dtype, heads, kv_heads, 128, 128, quant=quant, lse=True,
                           mask=Mask(window=5000 if shape == "mixed" else None))  # fmt: skip
    scales = torch.empty(kv_heads, device=META) if quant == "head" else None
    layer = AttentionLayer(CacheId(0), query, k_scale=scales, v_scale=scales)
    columns = -(-(max(c + s for c, s in zip(computed, scheduled, strict=True))) // size)
    batch = batch_of(scheduled, computed, size, columns)
    recorder = Recorder()
    backend = TritonBackend(
        "meta", TritonOptions(), target=TARGETS["sm_90"], processors=132, launcher=recorder
    )
    plan = backend.prepare(batch, AttentionGroup(0, query, (layer,), sized))
    tokens = batch.num_tokens
    fresh = {n: torch.empty(tokens, kv_heads, 128, dtype=torch.bfloat16, device=META) for n in ("k", "v")}
    q = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=META)
    backend.write(layer, fresh, cache, batch, plan)
    backend.attend(layer, {"q": q}, fresh, cache, plan, torch.empty_like(q),
                   torch.empty(tokens, heads, device=META))  # fmt: skip
    check_write(recorder.launches[0], tokens, kv_heads, blocks)
    staged = backend._buffers[0, query]._staging.host
    at, seen = 0, np.zeros(tokens, np.int64)
    for one in plan.passes:
        items = staged[at : at + one.items.numel()].reshape(-1, 9).astype(np.int64)
        merges = staged[at + one.items.numel() :][: one.merges.numel()].reshape(-1, 4).astype(np.int64)
        at += one.items.numel() + one.merges.numel()
        launch = next(x for x in recorder.launches if x[2].get("work_ptr") is one.items)
        check_attend(launch, items, tokens, heads, kv_heads, blocks)
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


def test_a_view_of_more_than_2_31_elements():
    content = KVHeads(8, 128, dtype="bfloat16")
    cache, _ = views(content, nhd(content), 16, 70_000)
    assert cache["k"].stride(0) * (len(cache["k"]) - 1) > 2**31


@pytest.mark.parametrize("field", ["k_head", "q_token", "block_size"])
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
        test_launches_stay_in_bounds("mixed", nhd, "bfloat16", None)
