"""Roundings that come too early, in the partitioned backend under 16-bit queries."""

from functools import partial

from .mutant import Mutant

_early = partial(Mutant, level="L2", victim="partitioned")
_HALF = "half = getattr(torch, query.dtype)\n"
MUTANTS = (
    _early(
        "scores_in_16_bits",
        broken="scores have the dtype of the queries",
        file="kernels.py",
        old="scores = torch.matmul(grouped, k_SKpD.transpose(2, 3)) * query.softmax_scale",
        new="scores = torch.matmul(grouped, k_SKpD.transpose(2, 3)) * query.softmax_scale\n"
        "scores = scores.to(getattr(torch, query.dtype)).float()",
        cases=("attend.data=large",),
    ),
    _early(
        "sums_in_16_bits",
        broken="weights are added up in the dtype of the queries",
        file="kernels.py",
        old="total = weights.sum(-1)",
        new=_HALF + "total = torch.zeros_like(weights[..., 0])\n"
        "for n in range(keys):\n"
        "    total = (total + weights[..., n]).to(half).float()",
        cases=("attend.data=flat",),
    ),
    _early(
        "values_added_in_16_bits",
        broken="weighted values are added up in the dtype of the queries",
        file="kernels.py",
        old="out = torch.matmul(grouped, v_SKpV)",
        new=_HALF + "out = torch.zeros_like(torch.matmul(grouped, v_SKpV))\n"
        "for n in range(keys):\n"
        "    out = (out + grouped[..., n : n + 1] * v_SKpV[:, :, n : n + 1]).to(half).float()",
        cases=("attend.data=flat",),
    ),
    _early(
        "weights_in_bfloat16",
        broken="weights are bfloat16 under float16 queries",
        file="kernels.py",
        old="weights = torch.exp(scores - floor[..., None])",
        new="weights = torch.exp(scores - floor[..., None])\n"
        'weights = weights.bfloat16().float() if query.dtype == "float16" else weights',
        cases=("attend.data=even.float16",),
    ),
    _early(
        "lse_in_16_bits",
        broken="the log-sum-exp has the dtype of the output",
        file="backend.py",
        old="lse[rows[used]] = found_SHQ.transpose(1, 2)[used]",
        new="lse[rows[used]] = found_SHQ.transpose(1, 2)[used].to(out.dtype).float()",
        cases=("attend.data=large", "attend.data=low"),
    ),
    _early(
        "peak_from_0",
        broken="the running peak begins at 0",
        file="kernels.py",
        old="peak = peaks.amax(0)",
        new="peak = peaks.amax(0)\npeak = torch.where(peak == -torch.inf, peak, peak.clamp(min=0))",
        cases=("attend.data=low",),
    ),
)
