"""The oracle: softmax attention in float64, written to be checked by eye.

It knows dense keys and values, one array a sequence, and nothing of blocks, layouts, views or backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Positions = int | npt.NDArray[np.int64]
# Scores of one piece of work, in elements: 32 MiB of float64, however long the step is.
PIECE = 1 << 22


@dataclass(frozen=True)
class Rules:
    """Everything that changes the answer. Positions count from the start of the sequence.

    Attributes:
        scale: Softmax scale.
        causal, window, chunk: The mask, as in `kvcore.attention.query.Mask`.
        softcap: ``cap * tanh(score / cap)``, after the scale.
        slopes_H: ALiBi slopes: ``-slope * |i - j|`` after the soft-cap.
        sinks_H: One extra logit a head in the denominator.
        codes: Keys and values stand for codes, which a kernel may round once more when it decodes them.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    slopes_H: Array | None = None
    sinks_H: Array | None = None
    codes: bool = False


class Condition(NamedTuple):
    """How strongly the answer reacts to roundings; `kvcore.testing.oracle.tolerance` says what each one is for.

    With p_j the probabilities, c_j the size of what is summed for score j, and r_j the size of its change when each
    element of the query (and of a decoded key) is off by its own size, independently:

    Attributes:
        weight_THV: ``sum_j p_j |v_j|``.
        sums_THV: ``sum_j p_j c_j (|v_j| + |out|)``.
        scores_THV: ``sqrt(sum_j p_j^2 r_j^2 (v_j - out)^2)``, keys counted from their mean: what all scores share
            cancels in a softmax.
        probs_THV: ``sqrt(sum_j p_j^2 v_j^2)``, twice the sum where values are decoded.
        lse_sums_TH: ``sum_j p_j c_j``.
        lse_scores_TH: Change of the log-sum-exp for the same roundings as in `scores_THV`.
    """

    weight_THV: Array
    sums_THV: Array
    scores_THV: Array
    probs_THV: Array
    lse_sums_TH: Array
    lse_scores_TH: Array


class Answer(NamedTuple):
    """The exact answer, and what rounding errors are measured against.

    Attributes:
        out_THV: Outputs [T, H, Dv]; 0 for a row that sees no key.
        lse_TH: Natural log-sum-exp, the sink included; -inf for a row that sees no key.
        condition: How strongly both react to roundings.
    """

    out_THV: Array
    lse_TH: Array
    condition: Condition


def sees(rules: Rules, i: Positions, j: Positions) -> npt.NDArray[np.bool_]:
    """Whether the query at position i sees the key at position j; arrays broadcast."""
    seen = np.ones(np.broadcast_shapes(np.shape(i), np.shape(j)), dtype=bool)
    if rules.causal:
        seen &= np.less_equal(j, i)
    if rules.window is not None:
        seen &= np.abs(np.subtract(i, j)) < rules.window
    if rules.chunk is not None:
        seen &= np.equal(np.floor_divide(i, rules.chunk), np.floor_divide(j, rules.chunk))
    return seen


def attention(
    rules: Rules,
    q_THD: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    num_computed: Sequence[int],
    num_scheduled: Sequence[int],
    *,
    conditioned: bool = True,
) -> Answer:
    """Attention of the last `num_scheduled` tokens of each sequence over its keys.

    Args:
        rules: Mask, scale and the rest.
        q_THD: Queries of all sequences, one after the other.
        keys: Per sequence [n, K, D]. Keys that no query sees are never touched.
        values: Per sequence [n, K, Dv].
        num_computed: Per sequence, the position of its first query.
        num_scheduled: Per sequence, its queries.
        conditioned: Whether the condition is asked for; else it is all zeros.
    """
    tokens, heads, _ = q_THD.shape
    wide, flat = (tokens, heads, values[0].shape[2]), (tokens, heads)
    answer = Answer(
        np.zeros(wide),
        np.full(flat, -np.inf),
        Condition(*(np.zeros(wide) for _ in range(4)), *(np.zeros(flat) for _ in range(2))),
    )
    row = 0
    for k, v, computed, scheduled in zip(keys, values, num_computed, num_scheduled, strict=True):
        step = max(1, PIECE // max(1, heads * len(k)))
        for first in range(0, scheduled, step):
            positions = np.arange(computed + first, computed + min(first + step, scheduled))
            seen_tn = sees(rules, positions[:, None], np.arange(len(k)))
            visible = np.flatnonzero(seen_tn.any(axis=0))
            if len(visible):
                rows = slice(row + first, row + first + len(positions))
                distance_tn = np.abs(positions[:, None] - visible)
                piece = q_THD[rows], k[visible], v[visible], seen_tn[:, visible], distance_tn
                _piece(rules, answer, rows, *piece, conditioned=conditioned)
        row += scheduled
    return answer


def _piece(
    rules: Rules,
    answer: Answer,
    rows: slice,
    q_tHD: Array,
    k_nKD: Array,
    v_nKV: Array,
    seen_tn: npt.NDArray[np.bool_],
    distance_tn: npt.NDArray[np.int64],
    *,
    conditioned: bool,
) -> None:
    """Some queries of one sequence; query head h reads KV head ``h // (H / K)``."""
    count, heads = q_tHD.shape[:2]
    k_KnD, v_KnV = k_nKD.transpose(1, 0, 2), v_nKV.transpose(1, 0, 2)
    kv_heads, group = len(k_KnD), heads // len(k_KnD)

    def by_kv_head(x_tH: Array) -> Array:
        """[t, H, ...] as [K, G t, ...]: the rows that read one KV head."""
        return x_tH.swapaxes(0, 1).reshape(kv_heads, group * count, *x_tH.shape[2:])

    def by_token(x_Kr: Array) -> Array:
        """The way back."""
        return x_Kr.reshape(heads, count, *x_Kr.shape[2:]).swapaxes(0, 1)

    q_KrD = by_kv_head(q_tHD)
    raw_Krn = rules.scale * (q_KrD @ k_KnD.swapaxes(1, 2))
    score_Krn, slope_of_cap, bias_Krn = raw_Krn, np.ones_like(raw_Krn), np.zeros_like(raw_Krn)
    if rules.softcap is not None:
        bent = np.tanh(raw_Krn / rules.softcap)
        score_Krn, slope_of_cap = rules.softcap * bent, 1 - bent**2
    if rules.slopes_H is not None:
        bias_Htn = rules.slopes_H[:, None, None] * distance_tn
        bias_Krn = bias_Htn.reshape(raw_Krn.shape)
        score_Krn = score_Krn - bias_Krn
    seen_rn = np.tile(seen_tn, (group, 1))
    logit_Krn = np.where(seen_rn, score_Krn, -np.inf)
    lse_Kr = _log_sum_exp(logit_Krn, None if rules.sinks_H is None else np.repeat(rules.sinks_H, count))
    blind = ~seen_rn.any(axis=1)
    p_Krn = np.exp(logit_Krn - np.where(blind, 0.0, lse_Kr)[..., None])
    out_KrV = p_Krn @ v_KnV
    lse_Kr[:, blind] = -np.inf
    answer.out_THV[rows], answer.lse_TH[rows] = by_token(out_KrV), by_token(lse_Kr)
    if not conditioned:
        return
    size_Krn = abs(rules.scale) * (np.abs(q_KrD) @ np.abs(k_KnD).swapaxes(1, 2))
    condition = _condition(rules, q_KrD, k_KnD, v_KnV, p_Krn, out_KrV, slope_of_cap, size_Krn + bias_Krn)
    for whole, part in zip(answer.condition, condition, strict=True):
        whole[rows] = by_token(part)


def _log_sum_exp(logit_Krn: Array, sinks_h: Array | None) -> Array:
    """Natural log-sum-exp [K, r]; a sink is one more logit of each row."""
    top_Kr = logit_Krn.max(axis=-1)
    sinks_Kr = None if sinks_h is None else sinks_h.reshape(top_Kr.shape)
    if sinks_Kr is not None:
        top_Kr = np.maximum(top_Kr, sinks_Kr)
    top_Kr = np.where(np.isneginf(top_Kr), 0.0, top_Kr)
    total_Kr = np.exp(logit_Krn - top_Kr[..., None]).sum(axis=-1)
    if sinks_Kr is not None:
        total_Kr = total_Kr + np.exp(sinks_Kr - top_Kr)
    with np.errstate(divide="ignore"):
        return np.asarray(top_Kr + np.log(total_Kr))


def _condition(
    rules: Rules,
    q_KrD: Array,
    k_KnD: Array,
    v_KnV: Array,
    p_Krn: Array,
    out_KrV: Array,
    slope_of_cap: Array,
    size_Krn: Array,
) -> Condition:
    """The sums that `Condition` names; as magnitudes they need no more than float32."""
    q, k, v, p, out = (x.astype(np.float32) for x in (q_KrD, k_KnD, v_KnV, p_Krn, out_KrV))
    pc_Krn = p * size_Krn.astype(np.float32)
    # sum_d q_d^2 (k_jd - mean_d)^2, where mean = sum_j p_j k_j.
    q2, mean_KrD = q * q, p @ k
    change2_Krn = q2 @ (k * k).swapaxes(1, 2)
    mean2_Kr1 = (q2 * mean_KrD * mean_KrD).sum(axis=-1, keepdims=True)
    centred2_Krn = change2_Krn - 2 * ((q2 * mean_KrD) @ k.swapaxes(1, 2)) + mean2_Kr1
    if rules.codes:
        centred2_Krn = centred2_Krn + change2_Krn
    g_Krn = (p * slope_of_cap.astype(np.float32) * np.float32(rules.scale)) ** 2
    w_Krn = g_Krn * np.maximum(centred2_Krn, 0)
    spread2_KrV = w_Krn @ (v * v) - 2 * out * (w_Krn @ v) + out * out * w_Krn.sum(axis=-1, keepdims=True)
    size = abs(v)
    lse2_Kr = rules.scale**2 * mean2_Kr1[..., 0] + ((g_Krn * change2_Krn).sum(axis=-1) if rules.codes else 0)
    found = (
        p @ size,
        pc_Krn @ size + abs(out) * pc_Krn.sum(axis=-1, keepdims=True),
        np.sqrt(np.maximum(spread2_KrV, 0)),
        np.sqrt((p * p) @ (v * v) * (2 if rules.codes else 1)),
        pc_Krn.sum(axis=-1),
        np.sqrt(lse2_Kr),
    )
    return Condition(*(x.astype(np.float64) for x in found))


def merge(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """One answer from the (outputs, natural log-sum-exps) over disjoint sets of keys."""
    lses = np.stack([lse for _, lse in parts])
    top = np.max(lses, axis=0)
    safe = np.where(np.isneginf(top), 0.0, top)
    shares = np.exp(lses - safe)
    total = shares.sum(axis=0)
    weights = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
    out = sum(w[..., None] * o for w, (o, _) in zip(weights, parts, strict=True))
    with np.errstate(divide="ignore"):
        return np.asarray(out), safe + np.log(total)
