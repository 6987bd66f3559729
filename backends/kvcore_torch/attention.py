"""Softmax attention of one tile of queries over gathered keys and values."""

from __future__ import annotations

import torch

from kvcore.backend import AttentionLayer
from kvcore_torch.tile_schedule import Tile


def attend_tile(
    layer: AttentionLayer,
    query_tHD: torch.Tensor,
    keys_KnD: torch.Tensor,
    values_KnD: torch.Tensor,
    tile: Tile,
    out_tHD: torch.Tensor,
    lse_tH: torch.Tensor | None,
    *,
    finite_values: bool,
) -> None:
    """Write outputs, and log-sum-exps where wanted.

    Args:
        layer: Scale, soft-cap, slopes and sinks.
        query_tHD: Queries in their own dtype.
        keys_KnD: Keys of the tile, in the dtype to compute in.
        values_KnD: Values of the tile.
        tile: Which query sees which key.
        out_tHD: Outputs, written.
        lse_tH: float32, written.
        finite_values: Whether every value is finite, so that ``0 * value`` is 0.
    """
    count, heads, _ = query_tHD.shape
    if tile.num_keys == 0:
        out_tHD.zero_()
        if lse_tH is not None:
            lse_tH.fill_(-torch.inf)
        return
    scores_KGtn = _scores(layer, query_tHD, keys_KnD, tile)
    probs_KGtn, lse_KGt1 = _softmax(layer, scores_KGtn, want_lse=lse_tH is not None)
    groups = keys_KnD.shape[0]
    weights = probs_KGtn.view(groups, -1, tile.num_keys)
    if tile.masked and not finite_values:
        result = _contaminated(weights, values_KnD, tile)
    else:
        result = torch.bmm(weights, values_KnD)
    result_tHD = result.view(heads, count, -1).transpose(0, 1)
    if tile.empty_t is not None:
        result_tHD = result_tHD.masked_fill(tile.empty_t[:, None, None], 0)
    out_tHD.copy_(result_tHD)
    if lse_tH is not None and lse_KGt1 is not None:
        found_tH = lse_KGt1.view(heads, count).transpose(0, 1)
        if tile.empty_t is not None:
            found_tH = found_tH.masked_fill(tile.empty_t[:, None], -torch.inf)
        lse_tH.copy_(found_tH)


def _scores(layer: AttentionLayer, query_tHD: torch.Tensor, keys_KnD: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[K, G, t, n] scores, with -inf where a query must not look."""
    count, heads, dim = query_tHD.shape
    groups = keys_KnD.shape[0]
    # The G query heads of a KV head are rows of one product: repeating the keys would cost G times more.
    scaled = query_tHD.to(keys_KnD.dtype) * layer.query.softmax_scale
    rows = scaled.transpose(0, 1).reshape(groups, (heads // groups) * count, dim)
    scores = torch.bmm(rows, keys_KnD.transpose(1, 2)).view(groups, heads // groups, count, tile.num_keys)
    if layer.query.softcap is not None:
        scores.div_(layer.query.softcap).tanh_().mul_(layer.query.softcap)
    if layer.alibi_slopes is not None:
        slopes = layer.alibi_slopes.to(scores.dtype).view(groups, -1, 1, 1)
        scores.sub_(slopes * tile.distance_tn())
    if tile.masked:
        scores.masked_fill_(tile.hidden_tn(), -torch.inf)
    return scores


def _softmax(
    layer: AttentionLayer, scores: torch.Tensor, *, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities [K, G, t, n] and, where wanted or at hand, the log-sum-exp [K, G, t, 1].

    Rows without any key become NaN here, and are overwritten by the caller.
    """
    if layer.sinks is None and not want_lse:
        return torch.softmax(scores, -1), None
    peak = scores.amax(-1, keepdim=True)
    sink = None
    if layer.sinks is not None:
        sink = layer.sinks.to(scores.dtype).view(scores.shape[0], -1, 1, 1)
        peak = torch.maximum(peak, sink)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - peak).exp_()
    return weights.div_(total), peak + total.log()


def _contaminated(weights_KrN: torch.Tensor, values_KnD: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The product where some value is not finite: it spoils the queries that see it, and no others.

    A plain product would give ``0 * NaN`` to every query of the tile.
    """
    finite = torch.isfinite(values_KnD)
    result = torch.bmm(weights_KrN, values_KnD.masked_fill(~finite, 0))
    visible_tn = (~tile.hidden_tn()).to(values_KnD.dtype)
    spoiled_KtD = torch.matmul(visible_tn, (~finite).to(values_KnD.dtype)) > 0
    groups, count = values_KnD.shape[0], len(visible_tn)
    shaped = result.view(groups, -1, count, result.shape[-1])
    return shaped.masked_fill(spoiled_KtD[:, None], torch.nan).view_as(result)
