"""Every architecture that can be made tiny: logits at every position equal `transformers`, to 1e-4.

The weights are scaled up until attention matters (asserted where the models are made), so that a wrong
mask, scale or sink cannot hide.
"""

from __future__ import annotations

import pytest
import torch
from models.tiny import DEFAULT_RUN, SPECS, tiny_model
from support.engines import make_llm
from support.reference import full_logits

import kvcore
from kvcore.errors import UnsupportedModelError

TOLERANCE = 1e-4
LENGTHS = (60, 47, 33, 18)
VARIANTS = {
    "prefill": ({}, 1.0),
    "chunks and decode": ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, 0.5),
    "preempted decode": ({"max_num_batched_tokens": 48, "max_num_seqs": 4}, 0.3),
}


def sequences(seed: int = 0) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(1, 250, (n,)).tolist() for n in LENGTHS]


def least_blocks(path, keys) -> int:
    """Blocks with which the longest sequence just fits: several at once must preempt each other."""
    llm = make_llm(path, max_model_len=64, num_blocks=500, mla="expanded", **keys)
    return llm.plan.capacity.needed_units(64) + 1


def large_pages(path, keys, *, least: bool) -> int:
    """Bytes of an arena of large pages: of 500, or of those with which the longest sequence just fits."""
    llm = make_llm(path, max_model_len=64, placement="packed", mla="expanded", **keys)
    return llm.plan.needed_bytes if least else 500 * llm.plan.configs[0].large_page_bytes


def check(path, variant: str, placement: str) -> None:
    keys, share = VARIANTS[variant]
    least = variant.startswith("preempted")
    if placement == "packed":
        room = {"placement": "packed", "memory": large_pages(path, keys, least=least)}
    else:
        room = {"num_blocks": least_blocks(path, keys) if least else 500}
    llm = make_llm(path, max_model_len=64, mla="expanded", **room, **keys)
    assert llm.plan.configs[0].placement == placement
    texts = sequences()
    got = llm.score(texts, prompt_lens=[max(1, int(len(t) * share)) for t in texts])
    for text, mine, theirs in zip(texts, got, full_logits(path, texts), strict=True):
        assert mine.shape == theirs.shape
        assert float((mine - theirs).abs().max()) < TOLERANCE, len(text)
    if variant.startswith("preempted"):
        assert llm.stats()["preemptions"] > 0
    llm.core.manager.check_integrity()


@pytest.mark.parametrize("placement", ["slots", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", DEFAULT_RUN)
def test_default_run(name, variant, placement, tmp_path_factory):
    check(tiny_model(name, tmp_path_factory.getbasetemp()), variant, placement)


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_a_window_that_nothing_outgrows_is_full_attention(name, tmp_path_factory):
    """Windows and chunks of 16, sequences of 16: one group with the full layers, and transformers' logits."""
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    keys = (f"model.path={path}", "device=cpu", "cache.memory=1MiB", "model.dtype=float32")
    served = kvcore.LLM(*keys, "engine.max_model_len=16")
    assert [g.spec.kind for g in served.plan.configs[0].kv_cache_groups] == ["full"]
    texts = [s[:16] for s in sequences()]
    for mine, theirs in zip(served.score(texts), full_logits(path, texts), strict=True):
        assert float((mine - theirs).abs().max()) < TOLERANCE
    longer = kvcore.LLM(*keys, "engine.max_model_len=17")
    assert {g.spec.kind for g in longer.plan.configs[0].kv_cache_groups} - {"full"}


@pytest.mark.long
@pytest.mark.parametrize("placement", ["slots", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [n for n in SPECS if n not in DEFAULT_RUN])
def test_all_others(name, variant, placement, tmp_path_factory):
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    try:
        check(path, variant, placement)
    except UnsupportedModelError as refusal:
        pytest.skip(f"refused: {refusal}")
