"""Content is poisoned when it dies, and never while a request reads it or the prefix cache can hit it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import tiny_model
from support.engines import make_llm

from kvcore.engine.llm import LLM
from kvcore.engine.settings import SamplingParams
from kvcore.memory.arena import Arena
from kvcore.memory.poison import poison_blocks
from kvcore.memory.views import field_tensors
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.retention import Full

LIMITS = {"max_model_len": 96, "num_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def serve(llm: LLM, prompts: list[list[int]], count: int = 20, **keys: Any) -> list[list[int]]:
    """All prompts at once; their output ids."""
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, **keys)
    requests = [llm.core.add_request(f"{len(p)}.{i}", p, sampling) for i, p in enumerate(prompts)]
    while llm.core.has_unfinished:
        llm.core.step()
    return [r.output_ids for r in requests]


def values(llm: LLM, block: int) -> torch.Tensor:
    """Every number of a block, in all layers and fields (kernel blocks are manager blocks here)."""
    views = llm.core.executor.worker.runner.kv_caches
    return torch.cat([tensor[block].flatten() for fields in views for tensor in fields.values()])


@pytest.mark.parametrize(
    ("model", "blocks", "prefix_caching"),
    [("llama", 14, True), ("llama", 14, False), ("mistral_window", 9, True), ("gemma3", 30, True)],
)
def test_outputs_are_the_same_with_poison(model: str, blocks: int, prefix_caching: bool, where: Path) -> None:
    """Under pressure: preemption, eviction, windows that move on, prefix hits, forks that copy on write."""
    rng = random.Random(3)
    common = [rng.randrange(1, 250) for _ in range(33)]
    prompts = [[*common, rng.randrange(1, 250)] for _ in range(3)] + [[7 + i] * (30 + i) for i in range(3)]
    found, engines = [], []
    for sanitize in (False, True):
        limits = LIMITS | {"num_blocks": blocks, "prefix_caching": prefix_caching}
        llm = make_llm(tiny_model(model, where), sanitize=sanitize, **limits)
        found.append([serve(llm, prompts), serve(llm, prompts[::-1]), serve(llm, prompts[:1], n=3)])
        llm.core.manager.check_integrity()
        engines.append(llm)
    assert found[0] == found[1]
    plain, poisoned = engines
    assert plain.stats()["preemptions"] == poisoned.stats()["preemptions"] > 0
    assert poisoned.core.executor.worker.runner.cache.memory.poisoned > 30
    assert plain.core.executor.worker.runner.cache.memory.poisoned == 0
    if prefix_caching:
        assert poisoned.core.manager.stats()["evictions"] > 0
        assert poisoned.core.manager.stats()["prefix_hit_tokens"] > 0


def test_what_is_freed_without_being_cached_is_nan_at_the_next_step(where: Path) -> None:
    llm = make_llm(tiny_model("llama", where), sanitize=True, prefix_caching=False, **LIMITS)
    gone = llm.core.add_request("gone", [5] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
    llm.core.step()
    llm.core.step()
    _, ids = llm.core.manager.table(gone.row, 0)
    assert torch.isfinite(values(llm, ids[0])).all()
    while llm.core.has_unfinished:
        llm.core.step()
    serve(llm, [[9] * 3], 1)  # one block; the step that writes it begins with the poison
    poisoned = [b for b in ids if torch.isnan(values(llm, b)).all()]
    assert len(poisoned) >= len(ids) - 1  # one of them may have been handed on to the short request
    assert (values(llm, 0) == 0).all(), "the null block is never poisoned"


def test_what_can_be_hit_is_kept_until_it_is_evicted(where: Path) -> None:
    llm = make_llm(tiny_model("llama", where), sanitize=True, **LIMITS)
    prompt = [5, 6, 7, 8] * 10  # two full blocks and a half
    gone = llm.core.add_request("gone", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    llm.core.step()
    _, ids = llm.core.manager.table(gone.row, 0)
    while llm.core.has_unfinished:
        llm.core.step()
    serve(llm, [[9] * 3], 1)
    assert all(torch.isfinite(values(llm, b)).all() for b in ids[:2])
    before = llm.core.manager.stats()["prefix_hit_tokens"]
    serve(llm, [prompt], 2)
    assert llm.core.manager.stats()["prefix_hit_tokens"] == before + 32
    # 13 blocks hold 208 tokens: these evict it, and its blocks begin anew without a trace of it.
    old = {b: values(llm, b).clone() for b in ids[:2]}
    serve(llm, [[100 + i] * 60 for i in range(4)], 4)
    assert llm.core.manager.stats()["evictions"] > 0
    assert not any(torch.isin(values(llm, b), kept[kept != 0]).any() for b, kept in old.items())


@pytest.mark.parametrize("sanitize", [True, False])
def test_reading_dead_content_shows(sanitize: bool, where: Path) -> None:
    """A planted fault: a table that still names a block of a request that ended."""
    llm = make_llm(tiny_model("llama", where), sanitize=sanitize, prefix_caching=False, **LIMITS)
    logits: list[torch.Tensor] = []
    runner = llm.core.executor.worker.runner
    runner.logits_sink = lambda name, first, rows: logits.append(rows)
    runner.sanitizer = None  # it would tell before anything is read: `test_sanitizer.py`
    add = llm.core.add_request
    gone = add("gone", [5] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
    mine = add("mine", [11] * 40, SamplingParams(max_tokens=8, ignore_eos=True), keep_logits=True)
    for _ in range(2):
        llm.core.step()
    _, ids = llm.core.manager.table(gone.row, 0)
    while "gone" in llm.core.scheduler.requests:
        llm.core.step()
    assert all(torch.isfinite(rows).all() for rows in logits)
    runner.cache.tables.groups[0].rows_SN[runner.cache._places[mine.row], 0] = ids[0]
    llm.core.step()
    assert bool(torch.isnan(logits[-1]).all()) is sanitize, "without poison the fault stays silent"


def test_quantized_pages_get_extreme_codes_and_nan_scales() -> None:
    spec = KVCacheSpec(KVHeads(2, 8, dtype="int8", quant=Quant("token_head")), Full())
    config = plan({CacheId(0): spec}, {}, Budget(num_blocks=4), Limits(16), block_size=16).configs[0]
    arena = Arena(config.total_bytes, "cpu")
    poison_blocks(arena, config, 0, [2])
    fields = field_tensors(arena, config, CacheId(0))
    assert (fields["k"][2] == -128).all()
    assert torch.isnan(fields["v_scale"][2]).all()
    assert not fields["k"][[0, 1, 3]].any()


def test_the_key_switches_it_on() -> None:
    from kvcore.config.build import build
    from kvcore.config.compose import compose
    from kvcore.registry.loader import installed

    for words, wanted in (([], False), (["cache.sanitize=true"], True)):
        built = build(compose(words, installed()), installed(), purpose="plan")
        assert built.settings.cache.sanitize is wanted
