"""What the Triton backend is there to serve is served: every case, asked and planned, without a kernel."""

import pytest

from kvcore.registry.loader import installed
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.cases.outcome import Refused
from kvcore.testing.cases.planning import plan_case
from kvcore.testing.checks.runner import selected

# What it may refuse, and nothing else: names of cases, or facts of them.
MAY_REFUSE = {
    "float64": lambda c: "float64" in (c.dtype, c.stored_dtype, c.neighbour),
    "a plain cache of another dtype": lambda c: c.quant is None and c.stored_dtype != c.dtype,
    "a neighbour of another dtype": lambda c: c.neighbour not in ("", "window", c.dtype),
    "latents": lambda c: c.stores == "latent",
    "blocks that are no multiple of 16": lambda c: c.kernel_block_size % 16,
    "batch invariance and capture": lambda c: c.check in ("batch_invariant", "capture"),
}


def refusal(case, target):
    asked = case.asked()
    for one in asked:
        answer = target.spec.unsupported(one.query(), target.options)
        if answer is not None:
            return str(answer)
    try:
        plan_case(case, target)
    except Refused as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("level", ["quick", "full"])
def test_nothing_else_is_refused_by_triton(level):
    spec = installed().backend("triton")
    target, missing = switch_on(spec, spec.Config(), here())
    assert missing is None
    cases = [c for c in selected("triton", level=level) if c.seqs]
    refused = {c.id: refusal(c, target) for c in cases if not any(may(c) for may in MAY_REFUSE.values())}
    assert {name: why for name, why in refused.items() if why} == {}
    served = [c for c in cases if c.id in refused]
    values = {axis: {str(c.axes().get(axis)) for c in served} for axis in ("block_size", "mask", "dtype", "phase")}
    assert {"16", "32", "64", "128", "48"} <= values["block_size"]
    assert {"float16", "bfloat16", "float32"} == values["dtype"]
    assert {"prefill", "decode", "mixed", "chunked", "multi_token"} <= values["phase"]
    assert {"causal", "window", "chunk", "bidirectional"} <= values["mask"]
    for feature in ("sinks", "alibi", "softcap", "scale", "lse", "quant", "own_retention"):
        assert any(getattr(c, feature) for c in served), feature
    assert {(c.stored_dtype, c.quant) for c in served} >= {
        ("int8", "token_head"),
        ("fp8_e4m3", "tensor"),
        ("fp8_e4m3", "token_head"),
        ("fp8_e5m2", "head"),
    }
    assert {c.kernel_ratio for c in served} >= {1, 2, 4}
    assert {c.placement for c in served} == {"slots", "packed"}
