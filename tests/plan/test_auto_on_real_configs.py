"""`auto` holds no fewer tokens and sequences than either placement, for real configs at the lengths that matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.models.families import model_facts
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, plan

DATA = Path(__file__).parents[1] / "data" / "hf_configs"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "hf_configs"
FILES = {f.name.removesuffix("_config.json"): f for folder in (SHARED, DATA) for f in folder.glob("*.json")}
# Plain, windows of equal and unlike pages, chunks, latents with an indexer, compressed latents, delta net, Mamba-2.
COVERING = [
    "Qwen--Qwen3-8B",
    "openai--gpt-oss-120b",
    "nvidia--Gemma-4-26B-A4B-NVFP4",
    "XiaomiMiMo--MiMo-V2-Flash",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "deepseek-ai--DeepSeek-V3.2",
    "deepseek-ai--DeepSeek-V4-Flash",
    "nvidia--Qwen3.5-122B-A10B-NVFP4",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia--Nemotron-H-56B-Base-8K",
]


def check(name: str) -> None:
    facts = model_facts(json.loads(FILES[name].read_text()), dtype="bfloat16")
    for length in sorted({min(n, facts.max_model_len) for n in (8192, 32768, facts.max_model_len)}):
        caches = dict(facts.within(length).owned)
        for gib in (12, 64, 100):  # where the length fits at all
            held, least = {}, plan(caches, {}, Budget(memory=gib << 30), Limits(length), placement="slots")
            if not least.fits:
                continue
            for placement in ("auto", "slots", "packed"):
                capacity = plan(caches, {}, Budget(memory=gib << 30), Limits(length), placement=placement).capacity
                assert len(capacity.config.kv_cache_groups) <= 8
                concurrency = capacity.concurrency(length)
                held[placement] = (concurrency, int(concurrency * length), capacity.simultaneous(length))
            assert held["auto"] == tuple(map(max, zip(*held.values(), strict=True))), (length, gib, held)


@pytest.mark.parametrize("name", [n for n in COVERING if n in FILES])
def test_auto_holds_what_the_better_placement_holds(name: str) -> None:
    check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FILES.keys() - set(COVERING)))
def test_of_every_other_config_too(name: str) -> None:
    check(name)
