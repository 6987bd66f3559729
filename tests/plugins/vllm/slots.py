"""The oracle: attention over a dictionary of slots, by vLLM's meaning of tables and slots.

Position j of sequence s lies in slot ``block_table[s][j // P] * P + j % P`` of its group.
"""

from __future__ import annotations

import torch


def dense(q_THD, told, slots, given, block_size):
    """Softmax attention of every query, key by key from the slots.

    Args:
        q_THD: float64 queries of the step.
        told: Its `query_start_loc`, `seq_lens` and `block_table` as lists.
        slots: By slot, float64 key and value [K, D] each.
        given: The layer's arguments, in vLLM's words.
        block_size: Tokens of a block of the table.
    """
    starts, rows = told["query_start_loc"], []
    for s, length in enumerate(told["seq_lens"]):
        first = length - (starts[s + 1] - starts[s])
        for i in range(first, length):
            window = given.get("sliding_window")
            begin = 0 if window is None else max(0, i - window + 1)
            where = [told["block_table"][s][j // block_size] * block_size + j % block_size for j in range(begin, i + 1)]
            k_jKD, v_jKD = (torch.stack([slots[x][n] for x in where]) for n in (0, 1))
            shared = given["num_heads"] // given["num_kv_heads"]
            q_HD = q_THD[starts[s] + i - first]
            scores_Hj = torch.einsum("hd,jhd->hj", q_HD, k_jKD.repeat_interleave(shared, 1)) * given["scale"]
            if given.get("logits_soft_cap"):
                scores_Hj = given["logits_soft_cap"] * torch.tanh(scores_Hj / given["logits_soft_cap"])
            if given.get("alibi_slopes"):
                distance_j = torch.arange(begin, i + 1) - i
                scores_Hj = scores_Hj + torch.tensor(given["alibi_slopes"]).double()[:, None] * distance_j
            sinks = given.get("sinks")
            if sinks is not None:
                scores_Hj = torch.cat([scores_Hj, sinks.double()[:, None]], dim=1)
            weights_Hj = scores_Hj.softmax(-1)[:, : len(where)]
            rows.append(torch.einsum("hj,jhd->hd", weights_Hj, v_jKD.repeat_interleave(shared, 1)))
    return torch.stack(rows)
