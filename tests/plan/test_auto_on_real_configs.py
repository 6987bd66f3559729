"""`auto` holds no fewer tokens and sequences than either placement, for real configs at the lengths that matter."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from real_configs import REAL, model_name

from kvcore.cli.commands import command
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.engine.planning import prepare_plan
from kvcore.models.families import model_facts
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.registry.loader import installed

FILES = {model_name(f): f for f in REAL}
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
# Blocks of 256 tokens, so large that a large page of several is a share of the arena.
ON_A_DEVICE = ["stepfun-ai--Step-3.7-Flash-FP8"]


def compare(made: Callable[[str], Plan], length: int) -> None:
    """Where the length fits at all."""
    held = {}
    if not made("slots").fits:
        return
    for placement in ("auto", "slots", "packed"):
        capacity = made(placement).capacity
        assert len(capacity.config.kv_cache_groups) <= 8
        concurrency = capacity.concurrency(length)
        held[placement] = (concurrency, int(concurrency * length), capacity.simultaneous(length))
    assert held["auto"] == tuple(map(max, zip(*held.values(), strict=True))), (length, held)


def check(name: str) -> None:
    """With the core's plain layouts, in arenas of several sizes."""
    facts = model_facts(json.loads(FILES[name].read_text()), dtype="bfloat16")
    for length in sorted({min(n, facts.max_model_len) for n in (8192, 32768, facts.max_model_len)}):
        caches, limits = dict(facts.within(length).owned), Limits(length)
        for gib in (12, 64, 100):
            budget = Budget(memory=gib << 30)
            compare(lambda p, c=caches, b=budget, n=limits: plan(c, {}, b, n, placement=p), length)  # type: ignore[misc]


def check_on_a_device(name: str) -> None:
    """With the layouts of the backends that an H200 has, in 64 GiB."""
    words = [f"model.path='{FILES[name]}'", "device=h200-141gb", "cache.memory=64GiB"]

    def made(placement: str, *more: str) -> Plan:
        composed = compose([*words, f"cache.placement={placement}", *more], installed(), command("plan").root)
        return prepare_plan(build(composed, installed(), purpose="plan").settings, installed(), purpose="plan")[0]

    longest = made("slots").limits.max_model_len
    for length in sorted({min(n, longest) for n in (8192, 32768, longest)}):
        compare(lambda p, n=length: made(p, f"engine.max_model_len={n}"), length)  # type: ignore[misc]


@pytest.mark.parametrize("name", COVERING)
def test_auto_holds_what_the_better_placement_holds(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_with_the_blocks_of_a_devices_kernels(name: str) -> None:
    check_on_a_device(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FILES))
def test_every_config(name: str) -> None:
    check(name)
    check_on_a_device(name)
