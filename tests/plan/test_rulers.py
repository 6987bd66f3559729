"""Large pages: counts that are possible, padding that is small, and the cut against every cut of small pages."""

from __future__ import annotations

from itertools import product
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.plan.config import ARENA_ALIGNMENT
from kvcore.plan.rulers import REFERENCE_BLOCKS, REFERENCE_BYTES, Rulers, least_page, rulers

GROUPS = st.lists(st.tuples(st.integers(1, 4000), st.sampled_from([16, 32, 256])), min_size=1, max_size=5)


def cost(made: Rulers, needs: list[int]) -> float:
    """What a cut loses, from its definition."""
    page = made.large_page_bytes
    worst = max(1 - a * n / page for a, n in zip(made.counts, needs, strict=True))
    return worst + (len(needs) / 2 + 1) * page / min(REFERENCE_BYTES, REFERENCE_BLOCKS * max(needs))


@given(GROUPS)
def test_every_block_fits_and_keeps_its_alignment(groups: list[tuple[int, int]]) -> None:
    needs, units = [16 * n for n, _ in groups], [u for _, u in groups]
    made = rulers(needs, units)
    assert made.large_page_bytes % ARENA_ALIGNMENT == 0
    for need, unit, count in zip(needs, units, made.counts, strict=True):
        stride, rest = divmod(made.large_page_bytes, count)
        assert rest == stride % unit == 0
        assert stride >= need
    assert made.cost == pytest.approx(cost(made, needs))
    # Groups of equal blocks are cut alike.
    cut = dict(zip(zip(needs, units, strict=True), made.counts, strict=True))
    assert made.counts == tuple(cut[pair] for pair in zip(needs, units, strict=True))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_no_cut_of_small_pages_is_better(sizes: list[int]) -> None:
    """Every count up to a page of eight times the largest block; the least page that holds them."""
    needs, units = [256 * n for n in sizes], [16] * len(sizes)
    made = rulers(needs, units)
    every = product(*(range(1, 8 * max(needs) // n + 1) for n in needs))
    best = min(cost(Rulers(least_page(needs, units, counts), counts, 0), needs) for counts in every)
    assert made.cost <= 1.05 * best


PAGE = 16 * 8 * 128 * 2 * 2


@pytest.mark.parametrize(
    ("layers", "page"), [((10, 52), 260), ((12, 12), 12), ((20, 30), 60), ((11, 25), 275), ((13, 31), 403)]
)
def test_full_and_window_layers_of_one_page_are_packed_without_padding(layers: tuple[int, int], page: int) -> None:
    needs = [n * PAGE for n in layers]
    made = rulers(needs, [16, 16])
    assert made.large_page_bytes == page * PAGE == lcm(*needs)
    assert made.counts == tuple(page // n for n in layers)


def test_a_state_beside_attention_pads_neither() -> None:
    """Qwen3.5-122B: 36 delta-net states of 4.1 MB beside 12 layers with 2 KV heads of 256."""
    state = 36 * (64 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 64 * 128) * 2)
    attention = 12 * 2 * 256 * 2 * 2 * 16
    made = rulers([attention, state], [16, 16])
    for need, count in zip((attention, state), made.counts, strict=True):
        assert 1 - count * need / made.large_page_bytes < 0.005
    assert made.large_page_bytes < 1.01 * state


def test_a_rank_of_more_layers_uses_the_same_counts_on_a_larger_page() -> None:
    counts = rulers([3 * PAGE, 13 * PAGE], [16, 16]).counts
    for layers in ((3, 13), (2, 13), (3, 12), (4, 12)):
        needs = [n * PAGE for n in layers]
        page = least_page(needs, [16, 16], counts)
        assert all(page % (a * 16) == 0 and page // a >= n for a, n in zip(counts, needs, strict=True))
