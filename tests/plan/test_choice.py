"""`auto`: never worse than either placement, whatever is asked in between; block sizes by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import Model, block_first, kv_first, models, spec

from kvcore.errors import LayoutError
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content, KVHeads, State
from kvcore.spec.layout import KernelBlocks
from kvcore.spec.retention import Full, Latest, Retention, Window

GIB = 1 << 30
BF16 = "bfloat16"


def layers(*kinds: tuple[int, Content, Retention]) -> dict[CacheId, KVCacheSpec]:
    every = [KVCacheSpec(content, retention) for count, content, retention in kinds for _ in range(count)]
    return {CacheId(i): s for i, s in enumerate(every)}


GEMMA = layers((10, KVHeads(16, 128, dtype=BF16), Full()), (52, KVHeads(16, 128, dtype=BF16), Window(1024)))
UNLIKE = layers((8, KVHeads(1, 512, dtype=BF16), Full()), (40, KVHeads(8, 256, dtype=BF16), Window(1024)))
HYBRID = layers(
    (12, KVHeads(2, 256, dtype=BF16), Full()),
    (36, State(("s", "c"), ((64, 128, 128), (3, 12288)), ("float32", BF16)), Latest()),
)
EVEN = layers((12, KVHeads(8, 64, dtype=BF16), Full()), (12, KVHeads(8, 64, dtype=BF16), Window(128)))


@pytest.mark.parametrize("caches", [GEMMA, UNLIKE, HYBRID, EVEN], ids=["gemma", "unlike", "hybrid", "even"])
@pytest.mark.parametrize("length", [8192, 32768, 131072])
def test_auto_is_never_worse_than_either(caches: dict[CacheId, KVCacheSpec], length: int) -> None:
    for gib in (48, 64, 100):
        plans = {
            p: plan(caches, {}, Budget(memory=gib * GIB), Limits(length), placement=p)
            for p in ("auto", "slots", "packed")
        }
        held = {p: made.capacity.concurrency(length) for p, made in plans.items()}
        assert held["auto"] == max(held.values())
        assert len(plans["auto"].configs[0].kv_cache_groups) <= 8


def test_five_full_and_sixteen_window_layers_hold_what_fits() -> None:
    """At 131,072 tokens: 19.45 sequences by a width that was chosen for 8,192, and 23.21 by its own."""
    content = KVHeads(8, 128, dtype=BF16)
    caches = layers((5, content, Full()), (16, content, Window(4096)))
    ideal = 5 * 131072 + 16 * 4095
    for placement in ("auto", "slots", "packed"):
        made = plan(caches, {}, Budget(memory=64 * GIB), Limits(131072), placement=placement)
        most = 64 * GIB / (ideal * 2 * 2 * 8 * 128)
        assert made.capacity.concurrency(131072) > 0.95 * most


def test_what_is_considered_is_what_would_be_planned() -> None:
    made = plan(HYBRID, {}, Budget(memory=64 * GIB), Limits(8192))
    assert [c.placement for c in made.considered] == ["slots", "packed"]
    for c in made.considered:
        other = plan(HYBRID, {}, Budget(memory=c.reference_bytes), Limits(8192), placement=c.placement)
        assert c.sequences == other.capacity.concurrency(8192)
        assert c.needed_bytes == other.needed_bytes
        assert c.groups == len(other.configs[0].kv_cache_groups)


@given(models(("auto", "slots", "packed")), st.integers(1, 400), st.integers(1, 400), st.integers(1, 64))
def test_a_longer_sequence_never_needs_fewer_bytes(model: Model, a: int, b: int, batched: int) -> None:
    """Also where the placement, or the width of the groups, depends on the length."""
    short, long = sorted((a, b))
    needed = [model.plan(Budget(memory=1), Limits(n, batched)).needed_bytes for n in (short, long)]
    assert needed[0] <= needed[1]


@given(models(("auto",)), st.integers(1, 1 << 22), st.integers(1, 1 << 22), st.integers(1, 400))
def test_more_bytes_never_change_the_placement(model: Model, a: int, b: int, length: int) -> None:
    shapes = []
    for memory in (a, b):
        config = model.plan(Budget(memory=memory), Limits(length)).configs[0]
        strides = tuple(g.block_stride for g in config.kv_cache_groups)
        shapes.append(
            (config.placement, config.large_page_bytes, strides, [g.cache_ids for g in config.kv_cache_groups])
        )
    assert shapes[0] == shapes[1]


def sizes(made: Plan) -> dict[str, int]:
    return {g.spec.kind: g.block_size for g in made.configs[0].kv_cache_groups}


def test_block_sizes_by_kind() -> None:
    content = KVHeads(2, 8, dtype="float16")
    caches = layers((2, content, Full()), (4, content, Window(100)))
    kernel = KernelBlocks(multiple_of=16)
    offers = {c: block_first(content, kernel) for c in caches}
    for placement in ("slots", "packed"):
        asked = {"budget": Budget(memory=GIB), "limits": Limits(1000), "placement": placement}
        # Under slots a small page takes what a large one has room for.
        alone = {"full": 16 if placement == "packed" else 64, "window": 64}
        assert sizes(plan(caches, offers, **asked, block_size_by_kind={"window": 64})) == alone
        both = plan(caches, offers, **asked, block_size=32, block_size_by_kind={"window": 64})
        assert sizes(both) == {"full": 32, "window": 64}
        with pytest.raises(LayoutError) as info:
            plan(caches, offers, **asked, block_size_by_kind={"window": 24})
        assert info.value.field == "cache.block_size_by_kind.window"


def test_packed_groups_take_the_smallest_block_that_their_own_kernels_take() -> None:
    small, large = KVHeads(2, 8, dtype="float16"), KVHeads(4, 8, dtype="float16")
    caches = {CacheId(0): spec(small), CacheId(1): spec(large, Window(200))}
    offers = {CacheId(0): block_first(small), CacheId(1): block_first(large, KernelBlocks(sizes=(64,)))}
    made = plan(caches, offers, Budget(memory=GIB), Limits(1000), placement="packed")
    assert sizes(made) == {"full": 16, "window": 64}


def test_what_keeps_auto_from_packing_is_said() -> None:
    content = KVHeads(8, 256, dtype=BF16)
    offers = {c: block_first(s.content) for c, s in UNLIKE.items() if isinstance(s.content, KVHeads)}
    narrow = {c: LayoutOffer(o.backend, o.options, max_offset_bits=31) for c, o in offers.items()}
    refused = plan(UNLIKE, narrow, Budget(memory=GIB), Limits(8192)).considered[1].refused
    assert refused is not None
    assert "31 bits" in refused
    counted = plan(UNLIKE, offers, Budget(num_blocks=50), Limits(8192)).considered[1].refused
    assert counted is not None
    assert "num_blocks" in counted
    caches = layers((2, content, Full()), (2, content, Window(100)))
    field_first = plan(caches, {c: kv_first(content) for c in caches}, Budget(memory=GIB), Limits(8192))
    assert field_first.configs[0].placement == "slots"
    assert field_first.considered[1].refused is not None
    # Unlike pages of which some are field-first share no tensor; packed, the block-first options serve.
    mixed = {CacheId(0): kv_first(content), CacheId(1): block_first(KVHeads(4, 64, dtype=BF16))}
    two = {CacheId(0): spec(content), CacheId(1): spec(KVHeads(4, 64, dtype=BF16))}
    both = replace(mixed[CacheId(0)], options=(*mixed[CacheId(0)].options, *block_first(content).options))
    assert plan(two, {**mixed, CacheId(0): both}, Budget(memory=GIB), Limits(64)).configs[0].num_blocks >= 0
