"""How far an answer may lie from the oracle: what a right kernel in these dtypes may lose, derived row by row.

With u the unit roundoff of the query's dtype, a that of the accumulator (float32; float64 for float64), D the head
dimension, n the keys a row can see at most, and, from the oracle (`Condition`), how the row reacts to roundings:

    output   tol = 3 u scores              the scaled query, or a decoded key, rounded once in each element
                 + 3 u probs               probabilities, and decoded values, rounded once each
                 + a (4 sqrt(D) + 8) sums  products summed in the accumulator, scale, cap, bias
                 + a (4 sqrt(n) + 16) W    exp and the sum over keys; W = sum_j p_j |v_j|
                 + 2 u |out|               the result rounded to the query's dtype (by 2^-25 in float16 at least), and
                                           what the roundings of equal probabilities have in common
    lse      tol = 3 u lse_scores + a (4 sqrt(D) + 8) lse_sums + a (4 sqrt(n) + 16) + 2 a |lse|

Independent roundings add up like the root of the sum of their squares, and each counts with its bound u as if that
were its standard deviation (it is u / sqrt(3) at most): 3 of those are allowed. Sums of n rounded terms grow like
sqrt(n) for the same reason. All is first order: d(out) = sum_j p_j ds_j (v_j - out), d(lse) = sum_j p_j ds_j. Terms
in u vanish where the dtype is the accumulator's own. The cache's own rounding is no error: the oracle computes from
the numbers that the cache holds.
"""

from __future__ import annotations

import numpy as np

from kvcore.testing.oracle.attention import Answer, Array

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half the distance of the smallest numbers, where it can matter.
TINY = {"float16": 2.0**-25}


def accumulator(dtype: str) -> float:
    """Unit roundoff of the sums: float32, or float64 where the queries are."""
    return min(UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[dtype])


def output_tolerance(answer: Answer, dtype: str, head_dim: int, keys: int) -> Array:
    """Allowed error of each output, [T, H, Dv]."""
    u, a, found = UNIT_ROUNDOFF[dtype], accumulator(dtype), answer.condition
    rounded = 3 * u * (found.scores_THV + found.probs_THV) + 2 * u * np.abs(answer.out_THV) + TINY.get(dtype, 0)
    summed = (4 * np.sqrt(head_dim) + 8) * found.sums_THV + (4 * np.sqrt(keys) + 16) * found.weight_THV
    return np.asarray(rounded + a * summed)


def lse_tolerance(answer: Answer, dtype: str, head_dim: int, keys: int) -> Array:
    """Allowed error of each float32 log-sum-exp, [T, H]."""
    u, a, found = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float32"], answer.condition
    size = np.where(np.isfinite(answer.lse_TH), np.abs(answer.lse_TH), 0.0)
    summed = (4 * np.sqrt(head_dim) + 8) * found.lse_sums_TH + 4 * np.sqrt(keys) + 16 + 2 * size
    return np.asarray(3 * u * found.lse_scores_TH + a * summed)


def upper_bound(
    out_THV: Array, score_TH: Array, bias_TH: Array, weight_THV: Array, dtype: str, head_dim: int, keys: int
) -> Array:
    """More than `output_tolerance`, [T, H, Dv], from the sizes of a row alone: every rounding to its worst.

    Args:
        out_THV: Outputs.
        score_TH: At least the largest ``scale * sum_d |q_d * k_d|`` of the row.
        bias_TH: At least its largest ``slope * |i - j|``.
        weight_THV: At least ``sum_j p_j * |v_j|``.
        dtype: Of the queries.
        head_dim: D.
        keys: n.
    """
    u, a = UNIT_ROUNDOFF[dtype], accumulator(dtype)
    score = 3 * u * score_TH + a * (4 * np.sqrt(head_dim) + 8) * (score_TH + bias_TH)
    relative = 2 * score[..., None] + 6 * u + a * (4 * np.sqrt(keys) + 16)
    return np.asarray(relative * weight_THV + u * np.abs(out_THV))
