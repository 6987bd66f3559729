"""Log-sum-exps of another convention."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "lse_base_2",
        "L4",
        "the log-sum-exp is in base 2",
        "softmax.py",
        "lse_Ht1 = peak_Ht1 + log_total_Ht1",
        "lse_Ht1 = (peak_Ht1 + log_total_Ht1) / torch.log(torch.tensor(2.0))",
        cases=("attend.lse.base",),
        reports=("A36",),
    ),
    Mutant(
        "lse_of_two_bases",
        "L4",
        "the peak is natural and the rest in base 2",
        "softmax.py",
        "log_total_Ht1 = torch.log(total_Ht1)",
        "log_total_Ht1 = torch.log2(total_Ht1)",
        cases=("merge.split", "attend.lse.base"),
        reports=("A36",),
    ),
    Mutant(
        "lse_without_the_sink",
        "L4",
        "the sink is not in the log-sum-exp",
        "softmax.py",
        "return out_tHV, lse_tH",
        "lse_tH = (peak_Ht1 + weights_Htn.sum(-1, keepdim=True).log()).squeeze(-1).transpose(0, 1)\n"
        "return out_tHV, lse_tH",
        cases=("attend.lse.sinks",),
        reports=("A36",),
    ),
    Mutant(
        "lse_of_nothing_is_inf",
        "L4",
        "a row that sees no key gets +inf",
        "softmax.py",
        "nothing = q_tHD.new_full(q_tHD.shape[:2], -torch.inf)",
        "nothing = q_tHD.new_full(q_tHD.shape[:2], torch.inf)",
        cases=("padded.lse",),
        reports=("A36",),
    ),
    Mutant(
        "lse_heads_for_tokens",
        "L4",
        "the log-sum-exp is [H, T] in memory where [T, H] is asked for",
        "softmax.py",
        "lse_tH = lse_Ht1.squeeze(-1).transpose(0, 1)",
        "lse_tH = lse_Ht1.reshape(-1, facts.num_heads)",
        cases=("attend.lse.base",),
    ),
    Mutant(
        "lse_in_half_precision",
        "L4",
        "the log-sum-exp passes through float16",
        "backend.py",
        "lse[step.rows] = total.float()",
        "lse[step.rows] = total.half().float()",
        cases=("attend.lse.base",),
    ),
    Mutant(
        "no_lse_for_decodes",
        "L4",
        "a step of one token writes no log-sum-exp",
        "backend.py",
        "if lse is not None:",
        "if lse is not None and len(step.query_t) > 1:",
        cases=("attend.lse.base",),
    ),
)
