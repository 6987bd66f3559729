"""Capacity against counting up by hand, and against steps that really happen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import Model, limits, models, spec

from kvcore.attention.query import Mask
from kvcore.errors import CapacityError
from kvcore.plan.capacity import LONGEST, Capacity, Limits
from kvcore.plan.config import KVCacheGroupSpec
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import IndexKeys, KVHeads
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Retention, Window

units = st.integers(1, 80)


def planned(model: Model, units: int, limits: Limits) -> Plan:
    """The plan with this many ids (slots) or large pages (packed)."""
    if model.placement == "slots":
        return model.plan(Budget(num_blocks=units), limits)
    large = model.plan(Budget(memory=1), limits).configs[0].large_page_bytes
    return model.plan(Budget(memory=units * large), limits)


def taken(groups: tuple[KVCacheGroupSpec, ...], blocks: list[int]) -> int:
    """Ids, or large pages, that hold so many blocks of each group: one at a time."""
    total = 0
    for group, count in zip(groups, blocks, strict=True):
        left, a = count, group.blocks_per_large_page or 1
        while left > 0:
            left, total = left - a, total + 1
    return total


def counted(plan: Plan, tokens: int) -> int:
    """`simultaneous` by counting up from nothing."""
    config, limits = plan.configs[0], plan.limits
    usable = max(0, (config.num_blocks or config.num_large_pages) - 1)

    def fit(count: int) -> bool:
        blocks = []
        for g in config.kv_cache_groups:
            r = g.spec.retention
            kept = r.step_budget(limits.max_num_batched_tokens, g.block_size, min(count, limits.max_num_seqs))
            blocks.append(count * r.resident_blocks(tokens, g.block_size) + kept)
        return taken(config.kv_cache_groups, blocks) <= usable

    scheduled = min(tokens, limits.max_num_batched_tokens)
    alone = [g.spec.retention.blocks_for_step(tokens, scheduled, g.block_size) for g in config.kv_cache_groups]
    count = 0
    stateless = not any(g.spec.retention.resident_blocks(tokens, g.block_size) for g in config.kv_cache_groups)
    while fit(count + 1) and not (stateless and count >= limits.max_num_seqs):
        count += 1
    return max(count, int(taken(config.kv_cache_groups, alone) <= usable))


@given(models(), units, limits, st.integers(1, 300))
def test_simultaneous_is_what_counting_gives(model: Model, units: int, limits: Limits, tokens: int) -> None:
    plan = planned(model, units, limits)
    whole = plan.capacity.simultaneous(tokens)
    assert whole == counted(plan, tokens)
    assert whole <= plan.capacity.concurrency(tokens) < whole + 1


@given(models(), units, units, limits, st.integers(1, 300), st.integers(1, 300))
def test_capacity_grows_with_memory_and_shrinks_with_length(
    model: Model, a: int, b: int, limits: Limits, m: int, n: int
) -> None:
    small, large = (planned(model, units, limits).capacity for units in sorted((a, b)))
    short, long = sorted((m, n))
    assert small.simultaneous(long) <= large.simultaneous(long)
    assert small.simultaneous(long) <= small.simultaneous(short)
    assert small.longest() <= large.longest()
    assert small.concurrency(long) <= large.concurrency(long) + 1e-9
    assert small.needed_units(short) <= small.needed_units(long)
    if small.fits(long):
        assert large.fits(long)
        assert small.fits(short)


@given(models(), st.integers(1, 60_000), st.integers(1, 60_000), limits)
def test_more_bytes_never_hold_less(model: Model, a: int, b: int, limits: Limits) -> None:
    small, large = (model.plan(Budget(memory=m), limits).capacity for m in sorted((a, b)))
    assert small.total <= large.total
    assert small.simultaneous(64) <= large.simultaneous(64)
    assert small.longest() <= large.longest()


@given(models(), units, limits)
def test_the_longest_length_fits_and_the_next_does_not(model: Model, units: int, limits: Limits) -> None:
    plan = planned(model, units, limits)
    longest = plan.capacity.longest()
    assert longest == 0 or plan.capacity.fits(longest)
    assert longest == LONGEST or not plan.capacity.fits(longest + 1)
    assert plan.fits == (limits.max_model_len <= longest)
    if plan.fits:
        plan.require_fit()
        return
    with pytest.raises(CapacityError) as info:
        plan.require_fit()
    assert str(plan.needed_bytes) in str(info.value)
    assert info.value.remedy is not None


@given(models(), limits)
def test_needed_bytes_are_needed_and_enough(model: Model, limits: Limits) -> None:
    needed = planned(model, 1, limits).needed_bytes
    assert model.plan(Budget(memory=needed), limits).fits
    assert not model.plan(Budget(memory=needed - 1), limits).fits


def blocks_read(r: Retention, queries: range, tokens: int, block_size: int) -> set[int]:
    """Blocks with one of the first `tokens` tokens that a query reads, from the mask alone."""
    held = set()
    for query in queries:
        for key in range(min(query + 1, tokens)):
            if isinstance(r, Window) and key <= query - r.size:
                continue
            if isinstance(r, Chunk) and key // r.size != query // r.size:
                continue
            held.add(key // block_size)
    return held


def blocks_held(r: Retention, tokens: int, scheduled: int, block_size: int) -> int:
    """Blocks of one request in a step that brings it to `tokens`; one that waits keeps its next reads."""
    queries = range(tokens - scheduled, tokens) if scheduled else range(tokens, tokens + 1)
    return len(blocks_read(r, queries, tokens, block_size))


@pytest.mark.parametrize("size", [1, 2, 5, 6, 9, 18])
@pytest.mark.parametrize("make", [Window, Chunk])
def test_what_capacity_promises_can_be_scheduled(size: int, make: Callable[[int], Retention]) -> None:
    """`simultaneous` sequences run any step, however it is split; twins of one length are the worst."""
    block_size, length, longest_step = 4, 40, 12
    limits = Limits(max_model_len=length, max_num_batched_tokens=longest_step, max_num_seqs=64)
    caches = {CacheId(0): spec(KVHeads(1, 4), Full()), CacheId(1): spec(KVHeads(1, 4), make(size))}
    rng = random.Random(size)
    for blocks in (25, 45, 90, 200):
        plan = Model(caches, {}, block_size, "slots").plan(Budget(num_blocks=blocks), limits)
        count = plan.capacity.simultaneous(length)
        for trial in range(60):
            # Half of the trials: every request has the same length, and each decodes one token.
            lengths = [rng.randint(longest_step, length) for _ in range(count)]
            if trial % 2:
                lengths = [length - trial // 2 % 20] * count
            held, left = 0, longest_step
            for tokens in lengths:
                scheduled = min(left, 1 if trial % 2 else rng.randint(0, longest_step))
                left -= scheduled
                for g in plan.configs[0].kv_cache_groups:
                    held += blocks_held(g.spec.retention, tokens, scheduled, block_size)
            assert held <= plan.capacity.usable


def test_a_budget_of_one_request_would_not_do() -> None:
    """64 decodes whose windows begin on the last slot of a block: each takes a block of its own more."""
    content = KVHeads(1, 4)
    limits = Limits(max_model_len=4096, max_num_batched_tokens=64, max_num_seqs=64)
    model = Model({CacheId(0): spec(content, Window(18))}, {}, 16, "slots")
    plan = model.plan(Budget(num_blocks=64 * 3 + 1), limits)
    assert plan.capacity.simultaneous(4096) == 64
    less = model.plan(Budget(num_blocks=64 * 3), limits)
    assert less.capacity.simultaneous(4096) == 63
    assert Capacity(plan.configs[0], limits).reserve(1) == [1 + 63 // 16]


@given(
    st.sampled_from([Window, Chunk]),
    st.integers(1, 700),
    st.integers(0, 40),
    st.integers(1, 64),
    st.integers(1, 300),
    st.integers(2, 200),
)
def test_a_window_that_no_sequence_can_outgrow_is_full_attention(
    kind: Any, longest: int, more: int, batched: int, seqs: int, blocks: int
) -> None:
    content = KVHeads(2, 8)
    limits = Limits(longest, batched, seqs)
    plain = {CacheId(i): KVCacheSpec(content, Full()) for i in range(4)}
    mixed = plain | {CacheId(i): KVCacheSpec(content, kind(longest + more)) for i in (1, 3)}
    bounded = {c: replace(s, retention=s.retention.within(longest)) for c, s in mixed.items()}
    assert bounded == plain
    # One token more than the window, and some query drops a token: then it is itself.
    shorter = KVCacheSpec(content, kind(longest))
    assert shorter.retention.within(longest + 1) == shorter.retention
    assert plan(bounded, {}, Budget(num_blocks=blocks), limits).as_dict() == (
        plan(plain, {}, Budget(num_blocks=blocks), limits).as_dict()
    )


def test_states_and_an_encoders_tokens_stay_what_they_are() -> None:
    for retention in (Latest(), Encoder(100), Full()):
        assert retention.within(5) is retention


def test_bytes_per_token_are_what_a_decoded_token_adds() -> None:
    caches = {
        CacheId(0): KVCacheSpec(KVHeads(2, 8, dtype="float16"), Full()),
        CacheId(0, "cross"): KVCacheSpec(KVHeads(4, 8, dtype="float16"), Encoder(100)),
        CacheId(1, "indexer"): KVCacheSpec(IndexKeys(128), Full()),
        CacheId(2, "indexer"): KVCacheSpec(IndexKeys(192), Full()),
    }
    made = plan(caches, {}, Budget(num_blocks=40), Limits(64))
    # Keys and values of 2 heads of 8 in 2 bytes; 128 and 192 bytes with a float32 scale for each 128.
    assert made.as_dict()["bytes_per_token"] == 2 * 2 * 8 * 2 + (128 + 4) + (192 + 8)


@given(st.sampled_from(["window", "chunk"]), st.integers(1, 300), st.integers(1, 300))
def test_a_mask_that_hides_nothing_is_none(kind: str, size: int, longest: int) -> None:
    """Against the mask key by key."""
    mask = Mask(window=size) if kind == "window" else Mask(chunk=size)
    last = longest - 1
    first_seen = max(0, last - size + 1) if kind == "window" else last // size * size
    assert mask.within(longest) == (Mask() if first_seen == 0 else mask)
