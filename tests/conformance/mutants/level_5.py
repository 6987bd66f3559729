"""Bits that do not repeat where it is declared that they do."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "products_in_any_order",
        "L5",
        "products are added in an order that changes from run to run",
        "softmax.py",
        'out_tHV = torch.einsum("htn,nhv->thv", probs_Htn, values_nHV)',
        "order_n = torch.randperm(len(values_nHV))\n"
        'out_tHV = torch.einsum("htn,nhv->thv", probs_Htn[..., order_n], values_nHV[order_n])',
        cases=("deterministic",),
    ),
    Mutant(
        "rounds_by_chance",
        "L5",
        "weights are rounded by chance",
        "softmax.py",
        "weights_Htn = torch.exp(scores_Htn - peak_Ht1)",
        "weights_Htn = torch.exp(scores_Htn - peak_Ht1)\n"
        "weights_Htn = weights_Htn * (1 + 2.0**-23 * torch.randint(0, 2, weights_Htn.shape))",
        cases=("deterministic",),
    ),
    Mutant(
        "dirty_workspace",
        "L5",
        "what earlier calls left in the workspace leaks into the answer",
        "backend.py",
        "out[step.rows] = result.to(out.dtype)",
        'self.calls = self.__dict__.get("calls", 0) + 1\n'
        "out[step.rows] = (result * (1 + self.calls % 3 * 2.0**-23)).to(out.dtype)",
        cases=("deterministic",),
    ),
    Mutant(
        "batches_from_the_end",
        "L5",
        "a batch of several sequences walks its keys from the end",
        "backend.py",
        "result, total = attend_dense(layer, q_tHD.to(wide), keys_nKD, values_nKV, step)",
        "if len(metadata.sequences) > 1:\n"
        "    from dataclasses import replace\n"
        "    step = replace(step, key_n=step.key_n.flip(0), seen_tn=step.seen_tn.flip(1))\n"
        "    keys_nKD, values_nKV = keys_nKD.flip(0), values_nKV.flip(0)\n"
        "result, total = attend_dense(layer, q_tHD.to(wide), keys_nKD, values_nKV, step)",
        cases=("batch_invariant",),
    ),
    Mutant(
        "divides_by_place",
        "L5",
        "a row's place in the batch decides how its weights are divided",
        "softmax.py",
        "probs_Htn = weights_Htn / total_Ht1",
        "probs_Htn = weights_Htn * (1 / total_Ht1) if step.rows.start else weights_Htn / total_Ht1",
        cases=("batch_invariant",),
    ),
    Mutant(
        "sums_by_place",
        "L5",
        "a row's place in the batch decides into how many sums its weights are cut",
        "softmax.py",
        "total_Ht1 = weights_Htn.sum(-1, keepdim=True)",
        "half = weights_Htn.shape[-1] // 2 if step.rows.start else 0\n"
        "total_Ht1 = weights_Htn[..., :half].sum(-1, keepdim=True)\n"
        "total_Ht1 = total_Ht1 + weights_Htn[..., half:].sum(-1, keepdim=True)",
        cases=("batch_invariant",),
    ),
)
