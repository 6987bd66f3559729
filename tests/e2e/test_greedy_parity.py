"""SmolLM2 in float32 gives the tokens of `transformers` generate, however the cache is used.

16 first turns of MT-bench, through the chat template and again as raw text: 32 requests in one continuous
batch, 64 new tokens each, EOS ignored on both sides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines import make_llm
from support.mt_bench import first_turns
from support.reference import NEAR_TIE, Greedy, greedy, once

from kvcore.engine.llm import LLM
from kvcore.engine.request import Request
from kvcore.engine.settings import SamplingParams

NEW = 64
PROMPTS = first_turns(16)
SAMPLING = SamplingParams(max_tokens=NEW, ignore_eos=True)
BASE = {"max_model_len": 512, "num_blocks": 600}
KV_FIRST = {"layout": "kv_first"}
OVER_16 = {"kernel_block_size": 16}
VARIANTS = {
    "plain, then again": BASE,
    "chunks of 16": {**BASE, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    "preempted, block 32 over 16, kv_first": {
        **BASE,
        "num_blocks": 60,
        "block_size": 32,
        "options": {"torch": {**KV_FIRST, **OVER_16}},
    },
}
# One thing at a time, where the run above fails.
ALONE = {
    "preempted": {**BASE, "num_blocks": 120},
    "kv_first": {**BASE, "options": {"torch": KV_FIRST}},
    "block 32 over 16": {**BASE, "block_size": 32, "options": {"torch": OVER_16}},
}


def token_ids(path: Path) -> list[list[int]]:
    """The 16 prompts through the chat template, and the same 16 as raw text, as transformers reads them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    messages = [[{"role": "user", "content": p}] for p in PROMPTS]
    texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
    chat = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    return chat + [tokenizer(p)["input_ids"] for p in PROMPTS]


@pytest.fixture(scope="module")
def reference(smollm2, tmp_path_factory) -> Greedy:
    # All pytest-xdist workers share the parent of their base folders.
    home = tmp_path_factory.getbasetemp().parent
    return once(home / "greedy.pt", lambda: greedy(smollm2, token_ids(smollm2), NEW))


def run(llm: LLM, prompts: list[list[int]]) -> list[Request]:
    first = llm.core.scheduler.stats.output_tokens
    requests = [llm.core.add_request(f"{first}-{i}", ids, SAMPLING) for i, ids in enumerate(prompts)]
    while llm.core.has_unfinished:
        llm.core.step()
    llm.core.manager.check_integrity()
    assert llm.core.manager.stats()["blocks_used"] == 0
    return requests


def require_same(llm: LLM, want: Greedy, requests: list[Request]) -> None:
    """Equal tokens; from a near tie of the reference on, its tokens are forced on us to the end."""
    for i, request in enumerate(requests):
        got, tokens = request.output_ids, want.tokens[i].tolist()
        assert len(got) == NEW
        assert request.finish_reason == "length"
        differs = [n for n, (a, b) in enumerate(zip(tokens, got, strict=True)) if a != b]
        if not differs:
            continue
        assert want.gaps[i, differs[0]] <= NEAR_TIE, f"prompt {i}, token {differs[0]}"
        prompt = want.prompts[i]
        ours = llm.score([[*prompt, *tokens]], prompt_lens=[len(prompt)])[0][len(prompt) - 1 : -1].argmax(-1)
        wrong = (ours != want.tokens[i]) & (want.gaps[i] > NEAR_TIE)
        assert not bool(wrong.any()), f"prompt {i}: teacher-forced tokens differ at {torch.nonzero(wrong)}"


@pytest.mark.parametrize("variant", [*VARIANTS, *(pytest.param(v, marks=pytest.mark.long) for v in ALONE)])
def test_tokens_equal_transformers(smollm2, reference, variant):
    llm = make_llm(smollm2, **(VARIANTS | ALONE)[variant])
    ours = [llm.tokenizer.encode(p, chat=chat) for chat in (True, False) for p in PROMPTS]
    assert ours == reference.prompts
    layouts = {g.layout.layout.name for g in llm.plan.configs[0].kv_cache_groups}
    assert layouts == ({"kv_first"} if variant.endswith("kv_first") else {"hnd"})
    requests = run(llm, reference.prompts)
    require_same(llm, reference, requests)
    if variant.startswith("preempted"):
        assert llm.stats()["preemptions"] > 0
    if variant.endswith("again"):
        again = run(llm, reference.prompts)
        require_same(llm, reference, again)
        for request in again:
            # All but the last token can be hit, in whole blocks.
            assert request.num_cached_tokens == (len(request.prompt_ids) - 1) // 16 * 16
