"""Planning is near linear in layers and in kinds of layers, and what it skips changes nothing."""

from __future__ import annotations

import cProfile
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.plan import placement
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import ChosenClass, LayoutOffer, _conflict, _without_conflict, choose, classes
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, State
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd, nhd
from kvcore.spec.retention import Full, Latest, Retention, Window

RETENTIONS: tuple[Retention, ...] = (Full(), Window(20), Window(1000))


def _needed(made: placement.SlotsPlacement, limits: Limits, null: int = 1) -> int:
    """Bytes of one sequence at its largest step, off the groups of a placement one by one."""
    scheduled = min(limits.max_model_len, limits.max_num_batched_tokens)
    blocks = sum(
        g.chosen.members.spec.retention.blocks_for_step(limits.max_model_len, scheduled, g.chosen.block_size)
        for g in made.groups
    )
    return (blocks + null) * sum(made.strides)


def _beaten(a: placement.SlotsPlacement, b: placement.SlotsPlacement) -> bool:
    """Whether `b` has fewer groups than `a`, and needs hardly more at any length of the ladder."""
    more = len(a.groups) - len(b.groups)
    ladder = [Limits(length) for length in placement.LADDER]
    dearer = 1 + placement.GROUP_OVERHEAD * more
    return more > 0 and all(_needed(b, x, 0) <= _needed(a, x, 0) * dearer for x in ladder)


def _strides(made: placement.SlotsPlacement, unit: int) -> tuple[int, ...]:
    """The stride of each tensor, off all pages that lie in it."""
    found = []
    for i in range(max(len(g.cache_ids) for g in made.groups)):
        page = max(g.chosen.page_bytes for g in made.groups if i < len(g.cache_ids))
        found.append(-(-page // unit) * unit)
    return tuple(found)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.sampled_from(RETENTIONS)), min_size=1, max_size=5),
    st.integers(1, 100_000),
)
def test_the_width_is_the_best_of_all_widths(kinds: list[tuple[int, int, Retention]], longest: int) -> None:
    layers = [KVCacheSpec(KVHeads(heads, 8), retention) for count, heads, retention in kinds for _ in range(count)]
    chosen = choose(classes({CacheId(i): s for i, s in enumerate(layers)}, {}), 16, "slots")
    widest = max(len(c.members.cache_ids) for c in chosen)
    every = [placement._slots_of_width(chosen, width) for width in range(1, widest + 1)]
    made = placement.slots(chosen, Limits(longest))
    few = max(placement.MOST_GROUPS, min(len(p.groups) for p in every))
    allowed = [p for p in every if len(p.groups) <= few]
    kept = [p for p in allowed if not any(_beaten(p, other) for other in allowed)]
    assert _needed(made, Limits(longest)) == min(_needed(p, Limits(longest)) for p in kept)
    assert made in kept
    assert made.strides == _strides(made, placement._stride_unit(chosen))


@given(st.lists(st.permutations(["block", "field"]), min_size=1, max_size=4), st.lists(st.integers(1, 2), min_size=4))
def test_the_combination_is_the_best_of_all_combinations(orders: list[list[str]], heads: list[int]) -> None:
    caches, offers = {}, {}
    for i, order in enumerate(orders):
        content = KVHeads(heads[i], 8)
        caches[CacheId(i)] = KVCacheSpec(content, Window(10 + i))
        forms = {"block": hnd(content), "field": nhd(content, name="kv_first", order="field_first")}
        offers[CacheId(i)] = LayoutOffer(f"b{i}", tuple(LayoutOption(forms[o], KernelBlocks((16,))) for o in order))
    per_class: list[Sequence[ChosenClass]] = []
    for members in classes(caches, offers):
        per_class.append([ChosenClass(members, o.layout.at(16), 16) for o in members.options])
    ranked = sorted(product(*(range(len(o)) for o in per_class)), key=lambda ranks: (sum(ranks), ranks))
    every = [tuple(o[r] for o, r in zip(per_class, ranks, strict=True)) for ranks in ranked]
    for where in ("slots", "packed"):
        want = next((c for c in every if _conflict(c, where) is None), None)
        assert next(iter(_without_conflict(per_class, where)), None) == want


def _layers(name: str, count: int) -> dict[CacheId, KVCacheSpec]:
    content, state = KVHeads(2, 64), State(("s",), ((4, 64, 64),), ("float32",))
    patterns: dict[str, list[KVCacheSpec]] = {
        "full": [KVCacheSpec(content, Full())],
        "window": [KVCacheSpec(content, Full() if i == 5 else Window(1024)) for i in range(6)],
        "hybrid": [KVCacheSpec(content, Full()) if i == 7 else KVCacheSpec(state, Latest()) for i in range(8)],
        "unlike": [KVCacheSpec(KVHeads(1 + i, 64), Full()) for i in range(200)],
    }
    pattern = patterns[name]
    return {CacheId(i): pattern[i % len(pattern)] for i in range(count)}


@pytest.mark.parametrize("name", ["full", "window", "hybrid", "unlike"])
@pytest.mark.parametrize("where", ["slots", "packed"])
def test_ten_thousand_layers(name: str, where: str) -> None:
    """Counted in calls, ten times as many layers take ten times the work; a width at a time it was a hundred times."""

    def work(count: int) -> int:
        caches, profile = _layers(name, count), cProfile.Profile()
        profile.enable()
        made = plan(caches, {}, Budget(memory=64 << 30), Limits(8192), placement=where)
        made.explain()
        for cache in caches:
            made.configs[0].field_views(cache)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    assert work(10_000) < 12 * work(1000)
    assert work(10_000) < 500 * 10_000
