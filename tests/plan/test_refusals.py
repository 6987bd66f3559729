"""What cannot be planned is refused by name, with what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import block_first, kv_first, spec

import kvcore
from kvcore.errors import CapacityError, ConfigError, KVCoreError, LayoutError, SpecError
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads, Latent
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd, nhd
from kvcore.spec.retention import Full, Window

CONTENT = KVHeads(2, 8, dtype="float16")
FULL_AND_WINDOW = {CacheId(0): spec(CONTENT), CacheId(1): spec(CONTENT, Window(32))}
LIMITS = Limits(max_model_len=64)
TEN = Budget(num_blocks=10)


def test_kv_first_beside_block_first_is_refused_by_name() -> None:
    offers = {CacheId(0): kv_first(CONTENT), CacheId(1): block_first(CONTENT)}
    with pytest.raises(LayoutError) as info:
        plan(FULL_AND_WINDOW, offers, TEN, LIMITS)
    assert info.value.field == "layout"
    assert info.value.got == {"full L0": "kv_first (field_first)", "window L1": "hnd (block_first)"}
    assert info.value.remedy


def test_a_backend_with_both_layouts_gives_way_to_one_with_one() -> None:
    both = LayoutOffer(
        "both",
        (
            LayoutOption(nhd(CONTENT, name="kv_first", order="field_first"), KernelBlocks(multiple_of=16)),
            LayoutOption(hnd(CONTENT), KernelBlocks(multiple_of=16)),
        ),
    )
    offers = {CacheId(0): both, CacheId(1): block_first(CONTENT)}
    config = plan(FULL_AND_WINDOW, offers, TEN, LIMITS).configs[0]
    assert [g.layout.layout.name for g in config.kv_cache_groups] == ["hnd", "hnd"]
    assert (
        plan({CacheId(0): spec(CONTENT)}, {CacheId(0): both}, TEN, LIMITS)
        .configs[0]
        .kv_cache_groups[0]
        .layout.field_first
    )


def test_packed_takes_the_block_first_option_or_refuses() -> None:
    offers = {c: kv_first(CONTENT) for c in FULL_AND_WINDOW}
    with pytest.raises(LayoutError) as info:
        plan(FULL_AND_WINDOW, offers, Budget(memory=1 << 20), LIMITS, placement="packed")
    assert info.value.field == "cache.placement"


def test_kv_first_of_unlike_pages_is_refused() -> None:
    wide = KVHeads(4, 8, dtype="float16")
    caches = {CacheId(0): spec(CONTENT), CacheId(1): spec(wide)}
    offers = {CacheId(0): kv_first(CONTENT), CacheId(1): kv_first(wide)}
    with pytest.raises(LayoutError, match="equal bytes"):
        plan(caches, offers, TEN, LIMITS)


def test_unlike_pages_that_are_block_first_share_with_padding_that_is_charged() -> None:
    caches = {CacheId(0): spec(CONTENT), CacheId(1): spec(Latent(40, 8))}
    made = plan(caches, {}, TEN, LIMITS)
    assert [t.block_stride for t in made.configs[0].kv_cache_tensors] == [1536]
    # One sequence of 64 tokens: 4 blocks of each group, 1,024 and 1,536 bytes used of 1,536 each.
    assert made.as_dict()["waste_fraction"] == pytest.approx(1 - (1024 + 1536) / (2 * 1536))


@given(st.lists(st.integers(1, 80), min_size=1, max_size=3))
def test_auto_block_size_is_the_smallest_multiple_of_16_that_all_take(kernels: list[int]) -> None:
    caches = {CacheId(i): spec(KVHeads(i + 1, 8)) for i in range(len(kernels))}
    offers = {CacheId(i): block_first(KVHeads(i + 1, 8), KernelBlocks((k,))) for i, k in enumerate(kernels)}
    wanted = next((n for n in range(16, 4097, 16) if all(n % k == 0 for k in kernels)), None)
    if wanted is None:
        with pytest.raises(LayoutError) as info:
            plan(caches, offers, TEN, LIMITS)
        assert info.value.field == "cache.block_size"
        return
    config = plan(caches, offers, TEN, LIMITS).configs[0]
    # Where the largest page has room for it, a smaller one holds a multiple: a block costs every class the largest.
    heads = range(1, len(kernels) + 1)
    times = {h: min(len(kernels) // h, 4096 // wanted) for h in heads}
    assert [g.block_size for g in config.kv_cache_groups] == [wanted * times[h] for h in heads]
    assert len({t.block_stride for t in config.kv_cache_tensors}) == 1
    assert [g.kernel_block_size for g in config.kv_cache_groups] == kernels


def test_a_block_size_that_no_layout_takes() -> None:
    offers = {c: block_first(CONTENT, KernelBlocks(multiple_of=256)) for c in FULL_AND_WINDOW}
    with pytest.raises(LayoutError) as info:
        plan(FULL_AND_WINDOW, offers, TEN, LIMITS, block_size=48)
    assert info.value.field == "cache.block_size"
    assert info.value.got == 48
    assert "multiples of 256" in str(info.value)


def test_views_beyond_31_bit_offsets_are_refused() -> None:
    offer = block_first(CONTENT)
    narrow = LayoutOffer(offer.backend, offer.options, max_offset_bits=31)
    caches = {CacheId(0): spec(CONTENT)}
    elements_per_block = 16 * 2 * 8 * 2
    most = 2**31 // elements_per_block
    plan(caches, {CacheId(0): narrow}, Budget(num_blocks=most), LIMITS)
    with pytest.raises(CapacityError) as info:
        plan(caches, {CacheId(0): narrow}, Budget(num_blocks=most + 1), LIMITS)
    assert info.value.field == "max_offset_bits"
    plan(caches, {CacheId(0): offer}, Budget(num_blocks=most + 1), LIMITS)


def test_an_arena_that_holds_nothing_is_a_plan_that_does_not_fit() -> None:
    for placement in ("slots", "packed"):
        made = plan(FULL_AND_WINDOW, {}, Budget(memory=1), LIMITS, placement=placement)
        data = made.as_dict()
        assert data["fits"] is False
        assert data["max_model_len_fits"] == data["max_concurrency"] == data["tokens"] == 0
        assert data["needed_bytes"] > 1
        with pytest.raises(CapacityError):
            made.require_fit()


@pytest.mark.parametrize(
    ("make", "kind", "field"),
    [
        (lambda: Budget(), ConfigError, "cache.memory"),
        (lambda: Budget(memory=1, num_blocks=1), ConfigError, "cache.memory"),
        (lambda: Budget(memory=0), ConfigError, "cache.memory"),
        (lambda: Budget(num_blocks=-1), ConfigError, "cache.num_blocks"),
        (lambda: Limits(0), ConfigError, "engine.max_model_len"),
        (lambda: Limits(1, max_num_batched_tokens=0), ConfigError, "engine.max_num_batched_tokens"),
        (lambda: Limits(1, max_num_seqs=-3), ConfigError, "engine.max_num_seqs"),
        (lambda: Limits(2**31), ConfigError, "engine.max_model_len"),
        (lambda: plan({}, {}, TEN, LIMITS), SpecError, "caches"),
        (lambda: plan(FULL_AND_WINDOW, {}, TEN, LIMITS, block_size=0), ConfigError, "cache.block_size"),
        (lambda: plan(FULL_AND_WINDOW, {}, TEN, LIMITS, placement="heap"), ConfigError, "cache.placement"),
        (lambda: plan(FULL_AND_WINDOW, {}, TEN, LIMITS, placement="packed"), ConfigError, "cache.num_blocks"),
        (lambda: plan(FULL_AND_WINDOW, {}, TEN, LIMITS, shared={CacheId(2): CacheId(9)}), SpecError, "cache_id"),
        (lambda: plan(FULL_AND_WINDOW, {}, TEN, LIMITS, shared={CacheId(1): CacheId(0)}), SpecError, "shared"),
        (
            lambda: plan(FULL_AND_WINDOW, {}, TEN, LIMITS, shared={CacheId(2): CacheId(3), CacheId(3): CacheId(2)}),
            SpecError,
            "shared",
        ),
    ],
)
def test_bad_input_is_refused_by_field(make: Callable[[], object], kind: type[KVCoreError], field: str) -> None:
    with pytest.raises(kind) as info:
        make()
    assert info.value.field == field


def test_the_room_is_the_function() -> None:
    made = kvcore.plan({CacheId(0): spec(CONTENT, Full())}, {}, TEN, LIMITS)
    assert made.configs[0].num_blocks == 10
    assert made.as_dict([16])["simultaneous"] == {"16": 9}
