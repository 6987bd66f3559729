"""Sampling against float64 arithmetic written out, and against its own distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.worker.messages import SampleAsk
from kvcore.worker.sampler import Sampler, draw, filtered_probabilities, uniform

logits = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12)


def oracle(values, temperature, top_p, top_k):
    """Probabilities by the definition, one token after another."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp((values[i] - values[order[0]]) / temperature) for i in order]
    total = math.fsum(weights)
    kept, mass = [], 0.0
    for i, w in zip(order, weights, strict=True):
        if kept and mass >= top_p:
            break
        kept.append((i, w))
        mass += w / total
    total = math.fsum(w for _, w in kept)
    return {i: w / total for i, w in kept}


@given(logits, st.floats(0.1, 3), st.floats(0.05, 1), st.integers(0, 12))
def test_filters_match_the_definition(values, temperature, top_p, top_k):
    ids, got = filtered_probabilities(
        torch.tensor(values, dtype=torch.float64), SampleAsk(temperature, top_p, top_k, 0, 0)
    )
    want = oracle(values, temperature, top_p, top_k)
    # A mass within rounding of top_p may fall on either side; then one token more or less is right.
    if set(ids.tolist()) == set(want):
        for i, p in zip(ids.tolist(), got.tolist(), strict=True):
            assert p == pytest.approx(want[i], abs=1e-9)
    else:
        masses = torch.cumsum(
            torch.softmax(torch.tensor(values, dtype=torch.float64).sort(descending=True)[0] / temperature, 0), 0
        )
        assert top_k or float((masses - top_p).abs().min()) < 1e-9


def test_draws_follow_the_distribution():
    values = torch.tensor([1.0, 2.0, 0.5, -1.0])
    want = torch.softmax(values.double() / 0.8, 0)
    count = 4000
    found = torch.zeros(4, dtype=torch.float64)
    for seed in range(count):
        found[draw(values, SampleAsk(0.8, 1.0, 0, seed, 0))] += 1
    error = (found / count - want).abs()
    assert bool((error < 4 * (want * (1 - want) / count).sqrt()).all())


def test_a_draw_depends_on_seed_and_index_alone():
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(s, i) for s in range(20) for i in range(20)}) == 400


def test_greedy_takes_the_first_of_equals_and_mixes_with_sampling():
    rows = torch.tensor([[0.0, 5.0, 5.0], [1.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    greedy, tiny = SampleAsk(0.0, 1.0, 0, 0, 0), SampleAsk(0.01, 1.0, 0, 7, 0)
    assert Sampler()(rows, [[greedy], [greedy, tiny], [tiny]]) == ((1,), (0, 0), (2,))


@given(logits, st.integers(0, 10**6))
def test_top_k_of_one_is_greedy(values, seed):
    row = torch.tensor(values, dtype=torch.float32)
    best = max(range(len(values)), key=lambda i: (float(row[i]), -i))
    assert draw(row, SampleAsk(1.0, 1.0, 1, seed, 0)) == best


@pytest.mark.parametrize("temperature", [1e-3, 1e-307, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    values = torch.tensor([-40.0, 30.0, 12.0, 29.0])
    for position in range(5):
        assert draw(values, SampleAsk(temperature, 0.9, 0, 7, position)) == 1
