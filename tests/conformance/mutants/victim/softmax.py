"""Attention of one sequence over dense keys and values, one decision a line."""

from __future__ import annotations

import torch

from kvcore.attention.backend import AttentionLayer

from .step import SequenceStep


def attend_dense(
    layer: AttentionLayer, q_tHD: torch.Tensor, keys_nKD: torch.Tensor, values_nKV: torch.Tensor, step: SequenceStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [t, H, Dv] and log-sum-exps [t, H]."""
    facts = layer.query
    if len(step.key_n) == 0:
        zeros = q_tHD.new_zeros((*q_tHD.shape[:2], facts.head_dim_v))
        nothing = q_tHD.new_full(q_tHD.shape[:2], -torch.inf)
        return zeros, nothing
    kv_head_H = torch.arange(facts.num_heads, device=q_tHD.device) // facts.group_size
    keys_nHD = keys_nKD[:, kv_head_H]
    values_nHV = values_nKV[:, kv_head_H]
    scaled_tHD = q_tHD * facts.softmax_scale
    scores_Htn = torch.einsum("thd,nhd->htn", scaled_tHD, keys_nHD)
    if facts.softcap is not None:
        scores_Htn = facts.softcap * torch.tanh(scores_Htn / facts.softcap)
    if layer.alibi_slopes is not None:
        distance_tn = (step.query_t[:, None] - step.key_n[None, :]).abs()
        bias_Htn = layer.alibi_slopes[:, None, None] * distance_tn
        scores_Htn = scores_Htn - bias_Htn
    scores_Htn = scores_Htn.masked_fill(~step.seen_tn, -torch.inf)
    peak_Ht1 = scores_Htn.amax(-1, keepdim=True)
    if layer.sinks is not None:
        sinks_H11 = layer.sinks[:, None, None].to(scores_Htn.dtype)
        peak_Ht1 = torch.maximum(peak_Ht1, sinks_H11)
    weights_Htn = torch.exp(scores_Htn - peak_Ht1)
    total_Ht1 = weights_Htn.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total_Ht1 = total_Ht1 + torch.exp(sinks_H11 - peak_Ht1)
    probs_Htn = weights_Htn / total_Ht1
    out_tHV = torch.einsum("htn,nhv->thv", probs_Htn, values_nHV)
    log_total_Ht1 = torch.log(total_Ht1)
    lse_Ht1 = peak_Ht1 + log_total_Ht1
    lse_tH = lse_Ht1.squeeze(-1).transpose(0, 1)
    return out_tHV, lse_tH
