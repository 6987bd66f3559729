"""The kit's own addresses against the core's views, for every kind of layout and placement."""

import numpy as np
import pytest
import torch

from kvcore.memory.arena import Arena
from kvcore.memory.views import field_tensors
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.layout import Axis, KernelBlocks, LayoutField, LayoutOption, PageLayout, hnd, nhd
from kvcore.spec.retention import Full, Window
from kvcore.testing.oracle.layout_bytes import element_addresses

PLAIN = KVHeads(3, 16, dtype="float16")
SCALED = KVHeads(3, 16, dtype="int8", quant=Quant("token_head"))
X_PACKED = PageLayout(
    "x_packed",
    (
        LayoutField("k", (Axis("head", 3), Axis("dim", 2), Axis("token", None), Axis("dim", 8)), "float16"),
        LayoutField("v", (Axis("head", 3), Axis("dim", 16), Axis("token", None)), "float16"),
    ),
)
TOKEN_PACKED = PageLayout(
    "token_packed",
    (
        LayoutField("k", (Axis("token", None), Axis("head", 3), Axis("token", 2), Axis("dim", 16)), "float16"),
        LayoutField("v", (Axis("token", None), Axis("head", 3), Axis("dim", 16)), "float16"),
    ),
)
LAYOUTS = {
    "hnd": (PLAIN, hnd(PLAIN)),
    "nhd": (PLAIN, nhd(PLAIN, alignment=128)),
    "kv_first": (PLAIN, nhd(PLAIN, name="kv_first", order="field_first")),
    "x_packed": (PLAIN, X_PACKED),
    "token_packed": (PLAIN, TOKEN_PACKED),
    "scaled": (SCALED, hnd(SCALED)),
}


def configured(content, layout, placement, ratio):
    specs = {CacheId(i): KVCacheSpec(content, r) for i, r in enumerate((Full(), Full(), Window(20)))}
    option = LayoutOption(layout, KernelBlocks(sizes=(8 // ratio,)))
    offers = dict.fromkeys(specs, LayoutOffer("b", (option,)))
    budget = Budget(num_blocks=6) if placement == "slots" else Budget(memory=1 << 17)
    return specs, plan(specs, offers, budget, Limits(64), placement=placement, block_size=8).configs[0]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("placement", ["slots", "packed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_addresses_are_where_the_views_point(name, placement, ratio):
    content, layout = LAYOUTS[name]
    if layout.order == "field_first" and placement == "packed":
        return
    specs, config = configured(content, layout, placement, ratio)
    arena = Arena(config.total_bytes)
    for cache in specs:
        views, group = field_tensors(arena, config, cache), config.group_of(cache)
        slots = list(range(min(group.num_blocks, 5) * group.block_size))
        for field in layout.fields:
            view = views[field.name]
            # Number every element of the view in logical order, (token, *logical axes), by a permutation
            # of its split axes; then read those numbers through the kit's addresses.
            names = [a.name for a in field.axes]
            logical = ["token", *(n for n, _ in content.fields()[0].axes if n in names)]
            order = [0] + [1 + i for n in logical for i, m in enumerate(names) if m == n]
            numbers = torch.arange(view.numel()).reshape([view.shape[i] for i in order])
            back = [order.index(i) for i in range(view.dim())]
            width = view.element_size()
            for digit in range(2):
                part = (numbers // 251**digit % 251).permute(back)
                view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]).copy_(part)
                at = element_addresses(config, cache, field.name, slots)
                found = arena.raw.numpy().view(np.uint8)[at]
                want = (numbers // 251**digit % 251).reshape(-1, at.shape[1])[: len(slots)]
                np.testing.assert_array_equal(found, want.numpy())
