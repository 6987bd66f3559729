"""SmolLM2 in float32 gives the tokens of `transformers` generate, however the cache is used.

16 first turns of MT-bench, through the chat template and as raw text, 64 new tokens, EOS ignored.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from support.engines import make_llm
from support.mt_bench import first_turns
from support.reference import NEAR_TIE, Greedy, greedy, once

from kvcore.engine.settings import SamplingParams

NEW = 64
PROMPTS = first_turns(16)
SAMPLING = SamplingParams(max_tokens=NEW, ignore_eos=True)
BASE = {"max_model_len": 512, "num_blocks": 400}
VARIANTS = {
    "plain": BASE,
    "chunked": {**BASE, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    "preempted": {**BASE, "num_blocks": 60},
    "twice": BASE,
    "block 32 over 16": {**BASE, "block_size": 32, "options": {"torch": {"kernel_block_size": 16}}},
    "kv_first": {**BASE, "options": {"torch": {"layout": "kv_first"}}},
}


def token_ids(path: Path, chat: bool) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not chat:
        return [tokenizer(p)["input_ids"] for p in PROMPTS]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False
        )
        for p in PROMPTS
    ]
    return [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]


@pytest.fixture(scope="module")
def reference(smollm2, tmp_path_factory):
    @cache
    def of(chat: bool) -> Greedy:
        # All pytest-xdist workers share the parent of their base folders.
        home = tmp_path_factory.getbasetemp().parent
        return once(home / f"greedy-{chat}.pt", lambda: greedy(smollm2, token_ids(smollm2, chat), NEW))

    return of


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "raw"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_equal_transformers(smollm2, reference, variant, chat):
    want = reference(chat)
    llm = make_llm(smollm2, **VARIANTS[variant])
    assert [llm.tokenizer.encode(p, chat=chat) for p in PROMPTS] == want.prompts
    outputs = llm.generate(PROMPTS, SAMPLING, chat=chat)
    if variant == "twice":
        first = llm.stats()["cached_tokens"]
        outputs = llm.generate(PROMPTS, SAMPLING, chat=chat)
        long_enough = [i for i, ids in enumerate(want.prompts) if len(ids) > 16]
        assert len(long_enough) >= 14
        assert all(outputs[i].num_cached_tokens >= 16 for i in long_enough)
        assert llm.stats()["cached_tokens"] > first
    if variant == "preempted":
        assert llm.stats()["preemptions"] > 0
    for i, output in enumerate(outputs):
        assert len(output.token_ids) == NEW
        assert output.finish_reason == "length"
        require_same(llm, want, i, output.token_ids)
    llm.core.manager.check_integrity()
    assert llm.core.manager.stats()["blocks_used"] == 0


def require_same(llm, want: Greedy, i: int, got: tuple[int, ...]) -> None:
    """Equal tokens; after a near tie of the reference, its tokens are forced on us to the end."""
    tokens = want.tokens[i].tolist()
    differs = [n for n, (a, b) in enumerate(zip(tokens, got, strict=True)) if a != b]
    if not differs:
        return
    assert want.gaps[i, differs[0]] <= NEAR_TIE, f"prompt {i}, token {differs[0]}"
    prompt = want.prompts[i]
    logits = llm.score([[*prompt, *tokens]], prompt_lens=[len(prompt)])[0]
    ours = logits[len(prompt) - 1 : -1].argmax(-1)
    wrong = (ours != want.tokens[i]) & (want.gaps[i] > NEAR_TIE)
    assert not bool(wrong.any()), f"prompt {i}: teacher-forced tokens differ at {torch.nonzero(wrong)}"
