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


@dataclass(frozen=True)
class Rules:
    """Everything that changes the answer. Positions count from the start of the sequence.

    Attributes:
        scale: Softmax scale.
        causal, window, chunk: The mask, as in `kvcore.attention.query.Mask`.
        softcap: ``cap * tanh(score / cap)``, after the scale.
        slopes_H: ALiBi slopes: ``-slope * |i - j|`` after the soft-cap.
        sinks_H: One extra logit a head in the denominator.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    slopes_H: Array | None = None
    sinks_H: Array | None = None


class Answer(NamedTuple):
    """The exact answer, and the magnitudes that rounding errors are measured against.

    Attributes:
        out_THV: Outputs [T, H, Dv]; 0 for a row that sees no key.
        lse_TH: Natural log-sum-exp, the sink included; -inf for a row that sees no key.
        weight_THV: ``sum_j p_j * |v_j|``.
        score_TH: Largest ``scale * sum_d |q_d * k_d|`` over the visible keys.
        bias_TH: Largest ``slope * |i - j|`` over the visible keys.
    """

    out_THV: Array
    lse_TH: Array
    weight_THV: Array
    score_TH: Array
    bias_TH: Array


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
) -> Answer:
    """Attention of the last `num_scheduled` tokens of each sequence over its keys.

    Args:
        rules: Mask, scale and the rest.
        q_THD: Queries of all sequences, one after the other.
        keys: Per sequence [n, K, D]. Keys that no query sees are never touched.
        values: Per sequence [n, K, Dv].
        num_computed: Per sequence, the position of its first query.
        num_scheduled: Per sequence, its queries.
    """
    tokens, heads, _ = q_THD.shape
    width = values[0].shape[2]
    answer = Answer(
        np.zeros((tokens, heads, width)),
        np.full((tokens, heads), -np.inf),
        np.zeros((tokens, heads, width)),
        np.zeros((tokens, heads)),
        np.zeros((tokens, heads)),
    )
    row = 0
    for k, v, computed, scheduled in zip(keys, values, num_computed, num_scheduled, strict=True):
        for i in range(computed, computed + scheduled):
            seen = np.flatnonzero(sees(rules, i, np.arange(len(k))))
            if len(seen):
                for h in range(heads):
                    kv_head = h // (heads // k.shape[1])
                    _one_head(rules, answer, row, h, i, seen, q_THD[row, h], k[seen, kv_head], v[seen, kv_head])
            row += 1
    return answer


def _one_head(
    rules: Rules,
    answer: Answer,
    row: int,
    h: int,
    i: int,
    seen: npt.NDArray[np.int_],
    q_D: Array,
    k_nD: Array,
    v_nV: Array,
) -> None:
    score_n = rules.scale * (k_nD @ q_D)
    if rules.softcap is not None:
        score_n = rules.softcap * np.tanh(score_n / rules.softcap)
    if rules.slopes_H is not None:
        bias_n = rules.slopes_H[h] * np.abs(i - seen)
        score_n = score_n - bias_n
        answer.bias_TH[row, h] = bias_n.max()
    logits = score_n if rules.sinks_H is None else np.append(score_n, rules.sinks_H[h])
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    p_n = np.exp(score_n - lse)
    answer.out_THV[row, h] = p_n @ v_nV
    answer.lse_TH[row, h] = lse
    answer.weight_THV[row, h] = p_n @ np.abs(v_nV)
    answer.score_TH[row, h] = abs(rules.scale) * (np.abs(k_nD) @ np.abs(q_D)).max()


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
