"""Several ranks: what each stores, the same groups and ids on all of them, and more of them never hold less."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from cache_facts import config_of, fact_files
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_models import Model, contents, limits, models, retentions

from kvcore.errors import ConfigError
from kvcore.models.families import model_facts
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.plan.ranks import Ranks
from kvcore.plan.stages import RankLayout
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content, KVHeads, Latent, State
from kvcore.spec.retention import Full, Latest, Retention, Window

GIB = 1 << 30
GEMMA = next(config_of(facts) for facts in fact_files() if facts["name"] == "gemma-3-27b-it")


def spread(caches: dict[CacheId, KVCacheSpec], ranks: Ranks, budget: Budget, layers: int, **options: str) -> Plan:
    specs = ranks.specs(caches, [])
    layout = RankLayout(ranks.stages(layers), ranks.tensor)
    return plan(specs, {}, budget, Limits(8192), ranks=layout, **options)


@pytest.mark.parametrize("placement", ["slots", "packed"])
def test_gemma_3_27b_over_four_stages_agrees_on_ids(placement: str) -> None:
    caches = model_facts(GEMMA).owned
    ranks = Ranks(pipeline=4)
    assert [len(stage) for stage in ranks.stages(62)] == [16, 16, 15, 15]
    made = spread(caches, ranks, Budget(memory=GIB), 62, placement=placement)
    first, *others = made.configs
    assert [c.global_rank for c in made.configs] == [0, 1, 2, 3]
    for config in others:
        assert (config.num_blocks, config.num_large_pages) == (first.num_blocks, first.num_large_pages)
        for mine, theirs in zip(config.kv_cache_groups, first.kv_cache_groups, strict=True):
            assert (mine.index, mine.spec, mine.block_size) == (theirs.index, theirs.spec, theirs.block_size)
            assert (mine.num_blocks, mine.blocks_per_large_page) == (theirs.num_blocks, theirs.blocks_per_large_page)
    for stage, config in zip(ranks.stages(62), made.configs, strict=True):
        placed = [c.layer for g in config.kv_cache_groups for c in g.cache_ids]
        assert sorted(placed) == list(stage)
        assert all(g.cache_ids for g in config.kv_cache_groups)  # every group is present
        assert config.total_bytes <= GIB
    # The stage with most bytes of an id holds the fewest of them, and decides.
    assert made.capacity.config.own_units == min(c.own_units for c in made.configs)
    rows = made.as_dict()["ranks"]
    assert [row["limiting"] for row in rows].count(True) == 1


def test_a_stage_is_charged_its_own_layers_alone() -> None:
    caches = {CacheId(i): KVCacheSpec(KVHeads(2, 8, dtype="float16"), Full()) for i in range(8)}
    one = spread(caches, Ranks(), Budget(memory=1 << 20), 8)
    two = spread(caches, Ranks(pipeline=2), Budget(memory=1 << 20), 8)
    page = 16 * 2 * 2 * 8 * 2
    assert (one.capacity.unit_bytes, two.capacity.unit_bytes) == (8 * page, 4 * page)
    assert two.configs[0].num_blocks == 2 * one.configs[0].num_blocks


def test_kv_heads_divide_or_are_repeated_or_are_refused_with_the_numbers() -> None:
    caches = {CacheId(0): KVCacheSpec(KVHeads(8, 64), Full())}
    heads = {n: Ranks(tensor=n).specs(caches, [48])[CacheId(0)].content for n in (1, 2, 4, 8, 16, 24, 48)}
    assert {n: c.num_kv_heads for n, c in heads.items() if isinstance(c, KVHeads)} == {
        1: 8, 2: 4, 4: 2, 8: 1, 16: 1, 24: 1, 48: 1,
    }  # fmt: skip
    for wrong in (3, 5, 6, 12, 32, 96):
        with pytest.raises(ConfigError) as caught:
            Ranks(tensor=wrong).specs(caches, [48])
        assert (caught.value.field, caught.value.allowed) == ("parallel.tensor", [1, 2, 4, 8, 16, 24, 48])


def test_latents_lie_whole_on_every_rank_and_heads_of_states_are_shared_out() -> None:
    latent = KVCacheSpec(Latent(512, 64), Full())
    # 8 heads of 4 and 1 group of 2 x 3 columns, which every rank needs.
    state = State(("conv", "ssm"), ((38, 3), (8, 4, 3)), ("float16", "float32"), (((8, 4), (1, 6)), ((8, 1),)))
    found = Ranks(tensor=4).specs({CacheId(0): latent, CacheId(1): KVCacheSpec(state, Latest())}, [8])
    assert found[CacheId(0)] == latent
    assert found[CacheId(1)].content == replace(state, shapes=((14, 3), (2, 4, 3)), heads=(((2, 4), (1, 6)), ((2, 1),)))


def test_ranks_share_tokens_of_what_would_lie_on_each_of_them() -> None:
    latent = {CacheId(0): KVCacheSpec(Latent(512, 64), Full()), CacheId(1): KVCacheSpec(Latent(512, 64), Window(64))}
    found = Ranks(tensor=8, decode_context=8).specs(latent, [8])
    # 1,000 tokens: 125 on each rank, in 8 blocks of 16; a window stays whole.
    assert found[CacheId(0)].retention.resident_blocks(1000, 16) == 8
    assert found[CacheId(0)].kind == "latent"
    assert found[CacheId(1)] == latent[CacheId(1)]
    heads = {CacheId(0): KVCacheSpec(KVHeads(4, 64), Full())}
    assert Ranks(tensor=8, decode_context=2).specs(heads, [8])[CacheId(0)].retention.resident_blocks(33, 16) == 2
    with pytest.raises(ConfigError) as caught:
        Ranks(tensor=8, decode_context=4).specs(heads, [8])
    assert (caught.value.field, caught.value.allowed) == ("parallel.decode_context", [1, 2])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Ranks(pipeline=5).stages(4)
    assert (caught.value.field, caught.value.allowed) == ("parallel.pipeline", "1 to 4")


def test_a_layer_cannot_read_a_cache_of_another_stage() -> None:
    caches = {CacheId(i): KVCacheSpec(KVHeads(2, 8), Full()) for i in range(3)}
    shared = {CacheId(3): CacheId(0)}
    layout = RankLayout(Ranks(pipeline=2).stages(4))
    with pytest.raises(ConfigError) as caught:
        plan(caches, {}, Budget(num_blocks=9), Limits(64), shared=shared, ranks=layout)
    assert caught.value.field == "parallel.pipeline"


@given(models(), limits, st.integers(1, 3), st.integers(1, 1 << 22), st.data())
def test_every_rank_holds_its_layers_and_ids_agree(
    model: Model, asked: Limits, stages: int, memory: int, data: st.DataObject
) -> None:
    layers = len(model.caches)
    assume(stages <= layers)
    ranks = Ranks(pipeline=stages)
    own = data.draw(st.lists(st.integers(1, memory), min_size=stages, max_size=stages))
    made = plan(
        model.caches,
        model.offers,
        Budget(memory=memory),
        asked,
        placement=model.placement,
        block_size=model.block_size,
        ranks=RankLayout(ranks.stages(layers), 1, lambda _: own),
    )
    sizes = {(c.num_blocks, c.num_large_pages, tuple(g.num_blocks for g in c.kv_cache_groups)) for c in made.configs}
    assert len(sizes) == 1
    for config, given_bytes, stage in zip(made.configs, own, ranks.stages(layers), strict=True):
        assert config.total_bytes <= given_bytes
        placed = [c for g in config.kv_cache_groups for c in g.cache_ids]
        assert sorted(placed) == sorted(c for c in model.caches if c.layer in stage)
        for group in config.kv_cache_groups if model.placement == "slots" else ():
            blocks = range(min(3, group.num_blocks))
            spans = sorted(span for c in group.cache_ids for b in blocks for span in config.footprint(c, b))
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
            assert not spans or spans[-1][1] <= config.total_bytes


@given(contents, retentions, st.integers(1, 4), limits, st.integers(1, 1 << 21))
def test_more_ranks_never_hold_less(
    content: Content, retention: Retention, layers: int, asked: Limits, memory: int
) -> None:
    """Each rank with the same bytes: more tensor ranks, or more stages, fit at least the same length and sequences."""
    caches = {CacheId(i): KVCacheSpec(content, retention) for i in range(layers)}
    found = {}
    for tensor in (1, 2, 6):
        for stages in range(1, layers + 1):
            ranks = Ranks(tensor, stages)
            try:
                specs = ranks.specs(caches, [12])
            except ConfigError:
                continue
            layout = RankLayout(ranks.stages(layers), tensor)
            capacity = plan(specs, {}, Budget(memory=memory), asked, block_size=8, ranks=layout).capacity
            found[tensor, stages] = (capacity.longest(), capacity.simultaneous(asked.max_model_len))
    for (tensor, stages), value in found.items():
        for (fewer, smaller), less in found.items():
            if tensor % fewer == 0 and stages >= smaller:
                assert all(more >= fewer for more, fewer in zip(value, less, strict=True)), (found, tensor, stages)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 400))
def test_the_bytes_needed_are_exact_on_every_number_of_stages(layers: int, stages: int, longest: int) -> None:
    assume(stages <= layers)
    caches = {CacheId(i): KVCacheSpec(KVHeads(2, 8), Full() if i % 3 else Window(40)) for i in range(layers)}
    layout = RankLayout(Ranks(pipeline=stages).stages(layers))

    def fits(memory: int) -> bool:
        return plan(caches, {}, Budget(memory=memory), Limits(longest), ranks=layout).fits

    needed = plan(caches, {}, Budget(memory=1 << 40), Limits(longest), ranks=layout).needed_bytes
    assert fits(needed)
    assert not fits(needed - 1)
