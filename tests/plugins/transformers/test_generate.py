"""`generate` on kvcore's blocks and backends: the tokens of transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mt_bench import short_turns
from support.reference import NEAR_TIE
from support.tiny_transformers import padded, random_prompts
from support.tutorial import BLOCK

MODELS = ("llama", "mistral_window", "gemma3", "gpt_oss")
TELL = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}


def require_same(model, inputs, cache, seed=1, **how):
    """Equal tokens; a greedy sequence may part where the two best logits of the reference lie within 1e-4."""
    torch.manual_seed(seed)
    want = model.generate(**inputs, **TELL, **how)
    torch.manual_seed(seed)
    got = model.generate(**inputs, **TELL, **how, cache=cache)
    width = inputs["input_ids"].shape[1]
    assert got.sequences.shape == want.sequences.shape
    differs = (got.sequences != want.sequences)[:, width:]
    for lane in differs.any(1).nonzero()[:, 0].tolist():
        at = int(differs[lane].nonzero()[0])
        best = want.logits[at][lane].topk(2).values
        assert not how.get("do_sample"), (lane, at)
        assert float(best[0] - best[1]) <= NEAR_TIE, (lane, at)
    cache.manager.check_integrity()
    return got.sequences[:, width:]


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_sixteen_prompts_in_a_padded_batch(plain, cache_for, name, how):
    model, inputs = plain(name), padded(random_prompts(16))
    tokens = require_same(model, inputs, cache_for(model), max_new_tokens=24, do_sample=how == "sampled")
    assert len(set(map(tuple, tokens.tolist()))) > 8  # not the same few tokens for all


@pytest.mark.parametrize("name", ["mistral_window", "gpt_oss"])
def test_four_continuations_share_the_blocks_of_their_prompt(plain, cache_for, name):
    model, inputs = plain(name), padded([random_prompts(1, longest=80, seed=3)[0], [7] * 40])
    inputs["input_ids"], inputs["attention_mask"] = (inputs[k][1:, -40:] for k in ("input_ids", "attention_mask"))
    cache = cache_for(model)
    require_same(model, inputs, cache, max_new_tokens=8, do_sample=True, num_return_sequences=4)
    # 47 tokens are in the cache: blocks 0 and 1 of 16 tokens are the prompt's alone; the third was begun by the prompt
    # and copied by all but the last who wrote. A window of 16 has let go of the first two: it reads from 32 on.
    stats, groups = cache.manager.stats(), cache.paged.config.kv_cache_groups
    shared = sum(0 if group.spec.kind == "window" else 2 for group in groups)
    assert stats["blocks_used"] == shared + 4 * len(groups)
    assert stats["copied_blocks"] == 3 * len(groups)


def test_beams_part_by_copy_on_write(plain, cache_for):
    model, inputs = plain("gemma3"), padded(random_prompts(3, seed=5))
    cache = cache_for(model)
    require_same(model, inputs, cache, max_new_tokens=16, do_sample=False, num_beams=4)
    assert cache.manager.stats()["copied_blocks"] > 0
    assert len(cache.manager.requests) <= 12


def test_a_prompt_in_pieces(plain, cache_for):
    model, inputs = plain("gpt_oss"), padded(random_prompts(6, seed=6))
    require_same(model, inputs, cache_for(model), max_new_tokens=8, do_sample=False, prefill_chunk_size=7)


def test_the_page_runs_and_the_default_model_answers_real_prompts(repo, capsys):
    """The programs of the page "Your backend in transformers", then real prompts on what they made."""
    from kvcore.models.home import ensure_model

    page = (repo / "docs" / "in-transformers.md").read_text()
    first, second = (m.group(4) for m in BLOCK.finditer(page) if m.group(2) == "python")
    space: dict[str, Any] = {}
    code = first.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(ensure_model())))
    exec(compile(f"{code}\n{second}", "docs/in-transformers.md", "exec"), space)
    told = capsys.readouterr().out.splitlines()
    assert "Paris" in told[0]
    assert told[1:] == ["2 blocks in use", "0 columns known", "48 columns known"]
    inputs = space["tokenizer"](short_turns(3), return_tensors="pt", padding=True)
    require_same(space["model"].eval(), inputs, space["cache"], max_new_tokens=12, do_sample=False)
