"""The oracle against numbers worked out by hand, and against torch's own attention."""

import math

import numpy as np
import pytest
import torch

from kvcore.testing.oracle.attention import Rules, attention, merge, sees


def one(rules, q, k, v, computed=None):
    """Answers of one head: q [t, D], k [n, D], v [n, Dv]."""
    q, k, v = (np.asarray(x, dtype=np.float64)[:, None] for x in (q, k, v))
    return attention(rules, q, [k], [v], [len(k) - len(q) if computed is None else computed], [len(q)])


def test_two_keys_by_hand():
    """Scores 0 and ln 3: probabilities 1/4 and 3/4."""
    answer = one(Rules(scale=0.5), [[2.0]], [[0.0], [math.log(3)]], [[8.0], [4.0]])
    assert answer.out_THV[0, 0, 0] == pytest.approx(8 / 4 + 4 * 3 / 4)
    assert answer.lse_TH[0, 0] == pytest.approx(math.log(4))
    assert answer.condition.weight_THV[0, 0, 0] == pytest.approx(5)


def test_a_sink_takes_its_share_and_gives_nothing():
    """A sink of ln 4 beside scores 0 and ln 3: the keys keep half."""
    rules = Rules(scale=1.0, sinks_H=np.array([math.log(4)]))
    answer = one(rules, [[1.0]], [[0.0], [math.log(3)]], [[8.0], [4.0]])
    assert answer.out_THV[0, 0, 0] == pytest.approx(5 / 2)
    assert answer.lse_TH[0, 0] == pytest.approx(math.log(8))


def test_softcap_before_alibi():
    """cap tanh(s / cap), then minus slope times distance."""
    rules = Rules(scale=1.0, softcap=2.0, slopes_H=np.array([0.5]))
    answer = one(rules, [[1.0]], [[3.0], [1.0]], [[1.0], [0.0]])
    first, second = 2 * math.tanh(1.5) - 0.5, 2 * math.tanh(0.5)
    assert answer.out_THV[0, 0, 0] == pytest.approx(1 / (1 + math.exp(second - first)))


@pytest.mark.parametrize(
    ("rules", "seen"),
    [
        (Rules(1.0), [0, 1, 2, 3, 4, 5]),
        (Rules(1.0, window=1), [5]),
        (Rules(1.0, window=3), [3, 4, 5]),
        (Rules(1.0, window=99), [0, 1, 2, 3, 4, 5]),
        (Rules(1.0, chunk=4), [4, 5]),
        (Rules(1.0, chunk=5), [5]),
        (Rules(1.0, causal=False), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Rules(1.0, causal=False, window=2), [4, 5, 6]),
    ],
)
def test_what_position_5_of_8_sees(rules, seen):
    assert [j for j in range(8) if sees(rules, 5, j)] == seen


def test_queries_are_the_last_ones():
    """Bottom right: two queries of five tokens are positions 3 and 4."""
    values = [[1.0], [2.0], [3.0], [4.0], [5.0]]
    answer = one(Rules(1.0, window=1), [[0.0], [0.0]], [[0.0]] * 5, values)
    assert answer.out_THV[:, 0, 0].tolist() == [4.0, 5.0]


def test_a_row_without_keys():
    answer = attention(Rules(1.0), np.ones((1, 1, 1)), [np.ones((0, 1, 1))], [np.ones((0, 1, 1))], [0], [1])
    assert answer.out_THV[0, 0, 0] == 0
    assert answer.lse_TH[0, 0] == -np.inf


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_against_torch(heads, causal):
    """Head h reads KV head h // (H / K): torch repeats KV heads the same way."""
    h, k = heads
    g = torch.Generator().manual_seed(1)
    q, key, value = (torch.randn(11, n, d, dtype=torch.float64, generator=g) for n, d in ((h, 8), (k, 8), (k, 5)))
    answer = attention(Rules(8**-0.5, causal=causal), q.numpy(), [key.numpy()], [value.numpy()], [0], [11])
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=causal, enable_gqa=True
    ).transpose(0, 1)
    np.testing.assert_allclose(answer.out_THV, want.numpy(), atol=1e-14)


def test_merged_parts_are_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((1, 1, 4), (9, 1, 4), (9, 1, 4)))
    whole = attention(Rules(0.5), q, [k], [v], [8], [1])
    parts = [attention(Rules(0.5), q, [k[a:b]], [v[a:b]], [b - a - 1], [1]) for a, b in ((0, 2), (2, 9))]
    out, lse = merge([(p.out_THV, p.lse_TH) for p in parts])
    np.testing.assert_allclose(out, whole.out_THV, atol=1e-14)
    np.testing.assert_allclose(lse, whole.lse_TH, atol=1e-14)
