"""vLLM's accounting against published logs, row by row, and our own plan of the same bytes beside each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import block_first

from kvcore.cli import main
from kvcore.errors import ConfigError, LayoutError
from kvcore.plan.accounting import VERSIONS, VllmPlan, differences, vllm_plan
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.plan.ranks import Ranks
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content, IndexKeys, KVHeads, Latent, Quant, State
from kvcore.spec.layout import KernelBlocks
from kvcore.spec.retention import Full, Latest, Retention, Window

GIB = 1 << 30
LINES = (Path(__file__).parents[1] / "data" / "planner_cases.jsonl").read_text().splitlines()
ROWS = {case["id"]: case for case in map(json.loads, LINES)}
DTYPES = {"bf16/fp16": "float16", "bf16": "float16", "fp8": "fp8_e4m3", "fp32": "float32"}
# One rank's line: the number of blocks is the least over ranks, of which the log shows another.
LEFT_OUT = {"log30"}
VLLM = [case for case in ROWS.values() if case["engine"] == "vllm" and case["id"] not in LEFT_OUT]
# Whose log it is; where all layers keep every token all versions say the same.
VERSION = {"log24": "pre_hybrid", "log25": "pre_hybrid", "log57": "concurrency"}
# What a row says in its notes alone.
WINDOW = {"log61": 1024}
STEP = {"log61": 8192}
WITHOUT_PREFIXES = {"log60"}
# Latents and index keys cut large pages of 11 and 96 blocks between them; the last of each is begun and not full.
# vLLM, which gives each layer both pages by one table, holds 50 of 344,128 tokens more.
SHORT = {"log54": 50}
# Rounding of the log: bytes to a hundredth of a GiB, of which one log cuts.
HALF = 0.005 * GIB


def heads(case: dict[str, Any], count: int | None = None, dim: int | None = None) -> KVHeads:
    dtype = DTYPES[case["kv_dtype"]]
    quant = Quant("tensor") if dtype.startswith("fp8") else None
    return KVHeads(count or case["kv_heads"], dim or case["head_dim"], dtype=dtype, quant=quant)


def caches_of(case: dict[str, Any]) -> dict[CacheId, KVCacheSpec]:
    """One tensor rank's caches of all layers, from the row's own fields."""
    kind, layers = case["kind"], case["layers"]
    made: list[tuple[Content, Retention]] = []
    if kind.startswith("mla"):
        made = [(Latent(512, 64, DTYPES[case["kv_dtype"]]), Full())] * layers
    elif kind == "swa-hybrid":
        full = case.get("full_layers", layers // 2)
        window = Window(case.get("sliding_window") or WINDOW[case["id"]])
        made = [(heads(case), window)] * (layers - full) + [(heads(case), Full())] * full
    elif kind == "hybrid-linear":
        # The row tells the bytes of a state on one rank.
        state = State(("state",), ((case["check"]["mamba_page_bytes"] // 2,),), ("float16",))
        made = [(state, Latest())] * case["linear_layers"] + [(heads(case), Full())] * case["attn_layers"]
    else:
        made = [(heads(case), Full())] * layers
    caches = {CacheId(i): KVCacheSpec(content, kept) for i, (content, kept) in enumerate(made)}
    if kind == "mla+indexer":
        caches |= {CacheId(i, "indexer"): KVCacheSpec(IndexKeys(128), Full()) for i in range(layers)}
    return Ranks(case.get("tp", 1)).specs(caches, [])


def limits_of(case: dict[str, Any]) -> Limits:
    step = case.get("max_num_batched_tokens") or STEP.get(case["id"], 2048)
    return Limits(case["max_model_len"] or 4096, step)


def theirs(case: dict[str, Any], memory: float) -> VllmPlan:
    return vllm_plan(
        caches_of(case),
        int(memory),
        limits_of(case),
        version=VERSION.get(case["id"], "min_block"),
        block_size=case.get("block_size"),
        prefix_caching=case["id"] not in WITHOUT_PREFIXES,
    )


def ours(case: dict[str, Any], memory: float) -> Plan:
    caches = caches_of(case)
    offers = {
        c: block_first(s.content, KernelBlocks(multiple_of=1)) if isinstance(s.content, KVHeads) else LayoutOffer()
        for c, s in caches.items()
    }
    size = case.get("block_size") if len({*caches.values()}) == 1 else None
    return plan(caches, offers, Budget(memory=int(memory)), limits_of(case), block_size=size)


def test_there_are_all_rows() -> None:
    assert len(ROWS) == 43
    assert len(VLLM) == 38


@pytest.mark.parametrize("case", [c for c in VLLM if c["needed_gib"]], ids=lambda c: c["id"])
def test_bytes_of_one_sequence(case: dict[str, Any]) -> None:
    needed = theirs(case, GIB).needed_bytes(case["max_model_len"])
    assert needed / GIB == pytest.approx(case["needed_gib"], abs=0.0101)
    assert needed / GIB == pytest.approx(case["check"]["needed_calc_gib"], abs=0.001)


@pytest.mark.parametrize("case", [c for c in VLLM if c.get("reported_est_max_len")], ids=lambda c: c["id"])
def test_the_length_that_is_estimated_to_fit(case: dict[str, Any]) -> None:
    made = theirs(case, GIB)
    low, high = (made.longest(int(case["available_gib"] * GIB + error)) for error in (-HALF, HALF))
    assert low <= case["reported_est_max_len"] <= high
    assert made.longest(int(case["available_gib"] * GIB)) == case["check"]["est_calc"]


@pytest.mark.parametrize("case", [c for c in VLLM if c["reported_tokens"]], ids=lambda c: c["id"])
def test_tokens_and_concurrency(case: dict[str, Any]) -> None:
    low, high = (theirs(case, case["available_gib"] * GIB + error) for error in (-HALF, HALF))
    assert low.tokens <= case["reported_tokens"] <= high.tokens
    if case.get("reported_concurrency"):
        # Two decimals, rounded.
        assert low.concurrency - 0.005 <= case["reported_concurrency"] <= high.concurrency + 0.005


def test_groups_pages_and_padding_of_hybrid_logs() -> None:
    for name in ("log57", "log58", "log60", "log61"):
        case = ROWS[name]
        check, made = case["check"], theirs(case, case["available_gib"] * GIB)
        assert len(made.groups) == check["groups"]
        assert {g.layers + g.padding for g in made.groups} == {check["group_layers"]}
        assert sum(g.padding for g in made.groups) == check.get("padding_layers", 0)
        if "attn_block_size" in check:
            assert max(g.block_size for g in made.groups) == check["attn_block_size"]
            assert made.block_bytes == check["group_layers"] * check["attn_page_bytes"]
            assert made.blocks_per_request(case["max_model_len"]) == check["blocks_per_request"]


@pytest.mark.parametrize("case", [c for c in VLLM if c["available_gib"]], ids=lambda c: c["id"])
def test_our_plan_is_never_worse(case: dict[str, Any]) -> None:
    """Of the same bytes, one null block subtracted on both sides: tokens, and whole sequences of the longest length."""
    memory = case["available_gib"] * GIB
    mine, other = ours(case, memory), theirs(case, memory)
    longest = limits_of(case).max_model_len
    without_null = theirs(case, memory - other.block_bytes)
    capacity = mine.capacity
    assert capacity.simultaneous(longest) >= int(without_null.concurrency)
    if case["max_model_len"] and len({*caches_of(case).values()}) > 1:
        tokens = int(capacity.concurrency(longest) * longest)
    else:
        tokens = capacity.usable * mine.configs[0].kv_cache_groups[0].block_size
    assert tokens >= without_null.tokens - SHORT.get(case["id"], 0)


# Four other engines, by what each counts.


def test_sglang_keys_and_values_of_one_rank() -> None:
    case = ROWS["log31"]
    caches = caches_of(case)
    made = plan(caches, {}, Budget(num_blocks=case["reported_tokens"]), Limits(4096), block_size=1)
    assert made.as_dict()["bytes_per_token"] == case["bytes_per_token_per_rank"]
    assert made.configs[0].total_bytes / 2 / GIB == pytest.approx(case["reported_k_gib"], abs=0.005)


def test_pegainfer_blocks_of_its_bytes() -> None:
    case = ROWS["log55"]
    made = plan(caches_of(case), {}, Budget(memory=12116 * 2**20 + 2**18), Limits(4096), block_size=16)
    assert made.configs[0].num_blocks == 5385
    # It reports all blocks.
    assert made.configs[0].num_blocks * 16 == case["reported_tokens"]


def test_llama_cpp_bytes_of_its_context() -> None:
    case = ROWS["log63"]
    made = plan(caches_of(case), {}, Budget(num_blocks=2), Limits(512), block_size=512)
    assert made.capacity.unit_bytes == case["check"]["calc_mib"] * 2**20


def test_transformers_blocks_with_and_without_sharing_the_heads_out() -> None:
    case = ROWS["log64"]
    whole, shared = (
        plan(caches_of({**case, "tp": tp}), {}, Budget(num_blocks=814), Limits(512), block_size=256) for tp in (1, 4)
    )
    memory = whole.configs[0].total_bytes
    assert memory == case["check"]["unsharded_blocks"] * whole.capacity.unit_bytes
    assert whole.capacity.unit_bytes == 4 * shared.capacity.unit_bytes
    room = plan(
        caches_of(case), {}, Budget(memory=memory + 2 * shared.capacity.unit_bytes), Limits(512), block_size=256
    )
    assert room.configs[0].num_blocks == case["check"]["blocks"]
    assert room.configs[0].num_blocks * 256 == case["reported_tokens"]


def test_differences_are_in_words_and_versions_are_checked() -> None:
    case = ROWS["log61"]
    made = theirs(case, case["available_gib"] * GIB)
    told = " ".join(differences(made, 50, 204_800))
    assert "8 padding layers" in told
    assert "205696 tokens" in told
    with pytest.raises(ConfigError):
        vllm_plan(caches_of(case), GIB, Limits(64), version="newest")
    uneven = {CacheId(0): KVCacheSpec(KVHeads(3, 8), Full()), CacheId(1): KVCacheSpec(KVHeads(2, 8), Window(8))}
    with pytest.raises(LayoutError):
        vllm_plan(uneven, GIB, Limits(64), version="min_block")


@given(st.sampled_from(VERSIONS), st.integers(1, 9), st.integers(0, 9), st.integers(1, 60), st.integers(1, 1 << 22))
def test_every_layer_lies_in_one_group_and_more_bytes_hold_no_less(
    version: str, full: int, windows: int, size: int, memory: int
) -> None:
    kinds: list[Retention] = [Full()] * full + [Window(size)] * windows
    caches = {CacheId(i): KVCacheSpec(KVHeads(1, 4), kept) for i, kept in enumerate(kinds)}
    limits = Limits(100, 32)
    made, more = (vllm_plan(caches, room, limits, version=version) for room in (memory, 2 * memory))
    assert more.tokens >= made.tokens
    assert more.concurrency >= made.concurrency
    assert made.longest(memory) <= more.longest(2 * memory)
    if version != "pre_hybrid" and windows:
        assert sum(g.layers for g in made.groups) == full + windows
        assert len({g.layers + g.padding for g in made.groups}) == 1


def test_the_command_prints_both_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "cache.memory=1GiB", "device=h100-80gb", "backend=torch", "plan.accounting=vllm", "output=json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    theirs = document["accounting"]
    # 30 layers, 3 heads of 64, keys and values in 2 bytes: 23,040 bytes a token, 16 tokens a block.
    assert theirs["block_bytes"] == 16 * 23_040
    assert theirs["num_blocks"] == GIB // (16 * 23_040)
    assert theirs["tokens"] == theirs["num_blocks"] * 16
    assert theirs["max_concurrency"] == pytest.approx(theirs["tokens"] / 8192, abs=0.01)
    assert theirs["differences"]
    # Each stage of two holds half the layers, unless all are charged to one.
    assert main([*words, "parallel.pipeline=2"]) == 0
    assert json.loads(capsys.readouterr().out)["accounting"]["block_bytes"] == 8 * 23_040
    assert main([*words, "parallel.pipeline=2", "plan.accounting_one_stage=true"]) == 0
    assert json.loads(capsys.readouterr().out)["accounting"]["block_bytes"] == 16 * 23_040
