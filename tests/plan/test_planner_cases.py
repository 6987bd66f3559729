"""Published logs of another engine: what one sequence needs, and the longest that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_models import Model, block_first, spec

from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, Plan
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.layout import KernelBlocks

GIB = 1 << 30
LINES = (Path(__file__).parent.parent / "data" / "planner_cases.jsonl").read_text().splitlines()
DTYPES = {"bf16/fp16": "float16", "fp8": "fp8_e4m3"}


def plain(case: dict[str, Any]) -> bool:
    """Grouped-query attention on one pipeline stage, reproduced by hand: what plan covers today."""
    return (
        case.get("reproduced") is True
        and case.get("kind") == "gqa"
        and case.get("pp", 1) == 1
        and case.get("kv_dtype") in DTYPES
        and case["kv_heads"] % case.get("tp", 1) == 0
        and case.get("check", {}).get("needed_ok") is True
    )


CASES = [case for case in map(json.loads, LINES) if plain(case)]


def planned(case: dict[str, Any], memory_bytes: int) -> Plan:
    """One rank of the case; tensor parallelism leaves each rank its share of the heads."""
    dtype = DTYPES[case["kv_dtype"]]
    content = KVHeads(
        case["kv_heads"] // case["tp"],
        case["head_dim"],
        dtype=dtype,
        quant=Quant("tensor") if dtype.startswith("fp8") else None,
    )
    caches = {CacheId(i): spec(content) for i in range(case["layers"])}
    offers = {c: block_first(content, KernelBlocks(multiple_of=1)) for c in caches}
    limits = Limits(max_model_len=case["max_model_len"])
    return Model(caches, offers, case["block_size"], "slots").plan(Budget(memory=memory_bytes), limits)


def test_there_are_cases() -> None:
    assert len(CASES) >= 10


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_bytes_per_token_and_for_one_sequence(case: dict[str, Any]) -> None:
    plan = planned(case, 1)
    assert plan.as_dict()["bytes_per_token"] == case["bytes_per_token_per_rank"]
    # The logs leave the null block out; they print two decimals, some rounded up.
    one_sequence = plan.needed_bytes - plan.capacity.unit_bytes
    assert one_sequence / GIB == pytest.approx(case["needed_gib"], abs=0.0101)
    assert one_sequence / GIB == pytest.approx(case["check"]["needed_calc_gib"], abs=0.001)


ESTIMATES = [c for c in CASES if c["check"].get("est_ok") and c["reported_est_max_len"]]


@pytest.mark.parametrize("case", ESTIMATES, ids=lambda c: c["id"])
def test_longest_length_that_fits(case: dict[str, Any]) -> None:
    unit = planned(case, 1).capacity.unit_bytes
    longest = planned(case, int(case["available_gib"] * GIB) + unit).capacity.longest()
    assert longest == case["check"]["est_calc"]
    # The log's own estimate, from bytes before they were rounded to 0.01 GiB.
    slack = 0.005 * GIB / case["bytes_per_token_per_rank"] + case["block_size"]
    assert abs(longest - case["reported_est_max_len"]) <= slack
