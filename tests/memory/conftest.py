"""Plans of many shapes: every layout, placement, content and kernel ratio of views and copies."""

from types import SimpleNamespace

import pytest

from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Latent, Quant, State
from kvcore.spec.layout import Axis, KernelBlocks, LayoutField, LayoutOption, PageLayout, hnd, nhd
from kvcore.spec.retention import Chunk, Full, Latest, Window

LIMITS = Limits(96, 32, 8)


def x_packed(content, x=4):
    """Keys as (head, dim/x, token, x), values as (head, dim, token)."""
    head, token = Axis("head", content.num_kv_heads), Axis("token", None)
    keys = (head, Axis("dim", content.head_dim // x), token, Axis("dim", x))
    values = (head, Axis("dim", content.v_dim), token)
    fields = (LayoutField("k", keys, content.dtype), LayoutField("v", values, content.dtype))
    return PageLayout("x_packed", fields)


def kv_first(content, **options):
    return nhd(content, name="kv_first", order="field_first", **options)


def offer(layout, kernel=None):
    blocks = KernelBlocks(multiple_of=1) if kernel is None else KernelBlocks(sizes=(kernel,))
    return LayoutOffer("any", (LayoutOption(layout, blocks),), 63)


def part(layers, content, retention, layout=None, kernel=None):
    """Layers of one kind; without a layout the core's plain one serves."""
    return layers, content, retention, layout, kernel


def make(parts, *, placement="slots", block_size=8, blocks=12, large_pages=4):
    """The plan of some parts."""
    caches, offers = {}, {}
    for layers, content, retention, layout, kernel in parts:
        for layer in layers:
            caches[CacheId(layer)] = KVCacheSpec(content, retention)
            if layout is not None:
                offers[CacheId(layer)] = offer(layout, kernel)

    def planned(budget):
        return plan(caches, offers, budget, LIMITS, placement=placement, block_size=block_size).configs[0]

    if placement == "slots":
        return planned(Budget(num_blocks=blocks))
    large = planned(Budget(memory=1 << 30)).large_page_bytes
    return planned(Budget(memory=large_pages * large))


HALF, SINGLE = KVHeads(2, 8, dtype="float16"), KVHeads(2, 8, dtype="float32")
ODD, UNLIKE = KVHeads(3, 5, dtype="float16"), KVHeads(3, 5, 7, dtype="float16")
FP8 = KVHeads(2, 8, dtype="fp8_e4m3", quant=Quant("tensor"))
INT8 = KVHeads(2, 8, dtype="int8", quant=Quant("token_head"))
INT4 = KVHeads(2, 8, dtype="int4", quant=Quant("token_head"))
MIXED = [
    part((0, 2, 4), HALF, Full(), nhd(HALF)),
    part((1, 3), INT8, Window(8), hnd(INT8), 4),
    part((5,), FP8, Chunk(16), nhd(FP8), 2),
    part((6,), INT4, Window(4), nhd(INT4), 4),
]
STATEFUL = [
    part((0,), HALF, Full(), hnd(HALF), 4),
    part((1,), Latent(6, 3, "bfloat16"), Full()),
    part((2,), State(("conv", "ssm"), ((3, 5), (2, 4)), ("float16", "float32")), Latest()),
]
PLANS = {
    "nhd": [part((0, 2, 4), HALF, Full(), nhd(HALF)), part((1, 3), HALF, Window(8), nhd(HALF))],
    "hnd_ratio_2": [part((0, 1), HALF, Full(), hnd(HALF), 4)],
    "kv_first": [part((0, 2), HALF, Full(), kv_first(HALF)), part((1, 3), HALF, Window(8), kv_first(HALF))],
    "kv_first_unlike_ratios": [
        part((0, 2), HALF, Full(), kv_first(HALF), 2),
        part((1,), HALF, Window(8), kv_first(HALF), 4),
    ],
    "kv_first_padded": [part((0, 1), ODD, Full(), kv_first(ODD, alignment=64))],
    "unlike_dims": [part((0, 1), UNLIKE, Full(), hnd(UNLIKE, alignment=32), 2)],
    "split_keys": [part((0,), HALF, Full(), x_packed(HALF)), part((1,), SINGLE, Window(8), hnd(SINGLE), 4)],
    "mixed": MIXED,
    "stateful": STATEFUL,
    "mixed_packed": MIXED,
    "stateful_packed": STATEFUL,
}


def build(name):
    return make(PLANS[name], placement="packed" if name.endswith("_packed") else "slots")


@pytest.fixture(params=PLANS)
def config(request):
    """One plan after the other."""
    return build(request.param)


@pytest.fixture
def plans():
    """Makes plans: those above by name, and others from parts."""
    return SimpleNamespace(build=build, make=make, recipe=PLANS.__getitem__)


@pytest.fixture
def delta():
    """Makes table deltas."""
    return lambda drop, keep, ids: SimpleNamespace(drop_front=drop, keep=keep, ids=ids)
