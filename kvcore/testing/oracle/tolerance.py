"""How far an answer may lie from the oracle: derived from dtype, length and accumulation, never per case.

With u the unit roundoff of the query's dtype, a that of the accumulator (float32; float64 for float64),
D the head dimension, n the keys a row can see at most, and from the oracle, for each row and head,
S = max_j scale * sum_d |q_d k_d|, B = the largest ALiBi bias, and for each output W = sum_j p_j |v_j|:

    score    ds  = 2 u S                        the scaled query, or a dequantized key, rounded once each
                 + a (4 sqrt(D) + 8) (S + B)    products summed in the accumulator, scale, cap, bias
    output   tol = 2 ds W                       d(out) = sum_j p_j ds_j (v_j - out)
                 + 2 u W                        probabilities, and dequantized values, rounded once each
                 + a (4 sqrt(n) + 16) W         exp and the sum over keys
                 + u |out|                      the result rounded to the query's dtype
    lse      tol = ds + a (4 sqrt(n) + 16) + 2 a |lse|

Sums of n rounded terms grow like sqrt(n) when roundings are independent; 4 standard deviations are allowed.
Terms in u vanish where the dtype is the accumulator's own. The cache's own rounding is no error: the oracle
computes from the numbers that the cache holds.
"""

from __future__ import annotations

import numpy as np

from kvcore.testing.oracle.attention import Answer, Array

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def accumulator(dtype: str) -> float:
    """Unit roundoff of the sums: float32, or float64 where the queries are."""
    return min(UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[dtype])


def score_error(answer: Answer, dtype: str, head_dim: int) -> Array:
    """Allowed error of a score, [T, H]."""
    u, a = UNIT_ROUNDOFF[dtype], accumulator(dtype)
    sums = a * (4 * np.sqrt(head_dim) + 8) * (answer.score_TH + answer.bias_TH)
    return np.asarray(2 * u * answer.score_TH + sums)


def output_tolerance(answer: Answer, dtype: str, head_dim: int, keys: int) -> Array:
    """Allowed error of each output, [T, H, Dv]."""
    u, a = UNIT_ROUNDOFF[dtype], accumulator(dtype)
    ds = score_error(answer, dtype, head_dim)[..., None]
    relative = 2 * ds + 2 * u + a * (4 * np.sqrt(keys) + 16)
    return np.asarray(relative * answer.weight_THV + u * np.abs(answer.out_THV))


def lse_tolerance(answer: Answer, dtype: str, head_dim: int, keys: int) -> Array:
    """Allowed error of each float32 log-sum-exp, [T, H]."""
    a = UNIT_ROUNDOFF["float32"]
    size = np.where(np.isfinite(answer.lse_TH), np.abs(answer.lse_TH), 0.0)
    return np.asarray(score_error(answer, dtype, head_dim) + a * (4 * np.sqrt(keys) + 16) + 2 * a * size)
