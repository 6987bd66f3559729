"""Worked examples with published numbers: GPT-2, a four-layer hybrid, Llama-2-70B."""

from __future__ import annotations

import pytest
from plan_models import Model, block_first, kv_first, spec

from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, Plan
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import KernelBlocks
from kvcore.spec.retention import Full, Window

GIB = 1 << 30
GPT2 = KVHeads(12, 64, dtype="float16")
GPT2_TENSOR_BYTES = 911_523_840


def gpt2(budget: Budget, block_size: int = 16) -> Plan:
    caches = {CacheId(i): spec(GPT2) for i in range(12)}
    offers = {c: kv_first(GPT2, KernelBlocks((16,))) for c in caches}
    return Model(caches, offers, block_size, "slots").plan(budget, Limits(max_model_len=1024))


@pytest.mark.parametrize(("block_size", "blocks"), [(16, 18_545), (32, 9_272)])
def test_gpt2_pages_and_views(block_size: int, blocks: int) -> None:
    config = gpt2(Budget(memory=12 * GPT2_TENSOR_BYTES), block_size).configs[0]
    (group,) = config.kv_cache_groups
    assert group.page_bytes == 49_152 * block_size // 16
    assert config.num_blocks == blocks
    assert [len(t.shared_by) for t in config.kv_cache_tensors] == [1] * 12
    if block_size == 16:
        assert {t.nbytes for t in config.kv_cache_tensors} == {GPT2_TENSOR_BYTES}
    k, v = config.field_views(CacheId(0))
    # [2, N, 16, 12, 64] in the unit of kernel blocks, where a block of 32 is two of 16.
    kernel_blocks = blocks * block_size // 16
    assert k.shape == v.shape == (kernel_blocks, 16, 12, 64)
    assert k.strides == v.strides == (24_576, 1_536, 128, 2)
    assert v.offset - k.offset == kernel_blocks * 24_576


def test_gpt2_blocks_of_48_tokens() -> None:
    assert gpt2(Budget(num_blocks=10)).capacity.resident(48) == [3]


@pytest.mark.parametrize("placement", ["auto", "slots"])
def test_full_and_window_layers_share_tensors(placement: str) -> None:
    content = KVHeads(8, 64, dtype="bfloat16")
    caches = {CacheId(i): spec(content, Window(64) if i % 2 else Full()) for i in range(4)}
    offers = {c: kv_first(content) for c in caches}
    plan = Model(caches, offers, 16, placement).plan(Budget(num_blocks=8), Limits(max_model_len=128))
    config = plan.configs[0]
    assert [g.spec.kind for g in config.kv_cache_groups] == ["full", "window"]
    shared = [{str(c) for c in t.shared_by} for t in config.kv_cache_tensors]
    assert shared == [{"L0", "L1"}, {"L2", "L3"}]
    as_data = plan.as_dict()
    assert [set(t["shared_by"]) for t in as_data["tensors"]] == shared
    assert "full: 2 layers (L0, L2)" in as_data["explain"]


def test_llama_2_70b() -> None:
    """A published walk-through says 2.5 GiB at 4,096 tokens; the arithmetic decides."""
    content = KVHeads(8, 128, dtype="float16")
    caches = {CacheId(i): spec(content) for i in range(80)}
    offers = {c: block_first(content) for c in caches}
    limits = Limits(max_model_len=4096)
    model = Model(caches, offers, 16, "slots")
    block_bytes = 16 * 327_680
    plan = model.plan(Budget(memory=40 * GIB + block_bytes), limits)
    data = plan.as_dict()
    assert data["bytes_per_token"] == 327_680
    assert data["bytes_per_block"] == block_bytes
    assert data["needed_bytes"] - block_bytes == 1.25 * GIB
    assert data["max_concurrency"] == 32
    assert data["tokens"] == 32 * 4096
    assert data["simultaneous"]["1024"] == 128
    assert data["waste_fraction"] == 0
    assert model.plan(Budget(memory=40 * GIB), limits).as_dict()["max_concurrency"] == 31


@pytest.mark.parametrize("window", [512, 1024, 4096])
def test_five_windows_to_one_full_layer_are_grouped_without_waste(window: int) -> None:
    """A Gemma-3 pattern: 10 full and 52 window layers; nobody pays for absent layers."""
    content = KVHeads(4, 64, dtype="bfloat16")
    caches = {CacheId(i): spec(content, Full() if i % 6 == 5 else Window(window)) for i in range(62)}
    offers = {c: block_first(content) for c in caches}
    plan = Model(caches, offers, 16, "slots").plan(Budget(memory=GIB), Limits(max_model_len=8192))
    data = plan.as_dict()
    page = 16 * 4 * 64 * 2 * 2
    resident = 10 * (8192 // 16) + 52 * (window // 16 + 1)
    widths = [len(g["layers"]) for g in data["groups"]]
    assert sum(widths) == 62
    held = sum(g["blocks_per_request"] for g in data["groups"])
    assert data["bytes_per_block"] == max(widths) * page
    # At most a tenth more than if every layer were charged its own blocks alone.
    assert held * data["bytes_per_block"] <= 1.1 * resident * page
    assert len(widths) <= 8


def test_the_explanation_can_be_recomputed() -> None:
    plan = gpt2(Budget(num_blocks=70))
    text = plan.explain()
    assert "70 blocks of 576 KiB" in text  # 12 x 49,152
    assert "one token adds 36864 bytes" in text  # 12 layers x 2 x 12 x 64 x 2
    assert "needs 64 blocks and the null block: 36.56 MiB; it fits" in text  # 65 x 576 KiB
    assert "at once, step reserve kept free: 1 sequences of 1024 tokens (1.08 before rounding)" in text
