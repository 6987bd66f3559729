"""Parts of blocks that are reused give the tokens of a cold run, on the default model and on tiny ones."""

from __future__ import annotations

import pytest
from models.tiny import tiny_model
from support.engines import make_llm

from kvcore.engine.sampling import SamplingParams

# 48 in common, then 5 and 37 more: reuse ends at any place of a block.
SHARED = [1 + i % 180 for i in range(48)]
PROMPTS = [SHARED + [7] * 48, SHARED + [7] * 5 + [9] * 30, SHARED + [7] * 37, SHARED[:41] + [3] * 20, SHARED]


def tokens(path, **keys) -> tuple[list[list[int]], list[int], int]:
    """Outputs, reused tokens and copied blocks of requests that come one after the other."""
    llm = make_llm(path, max_model_len=128, max_num_seqs=1, sanitize=True, **keys)
    texts, hits = [], []
    for i, prompt in enumerate(PROMPTS):
        request = llm.core.add_request(f"r{i}", prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        while request.finish_reason is None:
            llm.core.step()
        texts.append(list(request.output_ids))
        hits.append(request.num_cached_tokens)
    llm.core.manager.check_integrity()
    return texts, hits, llm.core.manager.stats()["copied_blocks"]


def check(path, **keys) -> None:
    cold, none, _ = tokens(path, prefix_caching=False, **keys)
    warm, hits, copied = tokens(path, partial_reuse="true", **keys)
    assert none == [0] * len(PROMPTS)
    assert hits == [0, 53, 84, 41, 47]
    assert copied >= 4
    assert warm == cold


def test_the_default_model(smollm2) -> None:
    check(smollm2, block_size=16)


@pytest.mark.parametrize("placement", ["slots", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_windows_and_full_layers(name: str, placement: str, tmp_path_factory) -> None:
    check(tiny_model(name, tmp_path_factory.getbasetemp()), block_size=16, placement=placement)


def test_unlike_block_sizes_reuse_parts_by_themselves(tmp_path_factory) -> None:
    """Blocks of 16 and of 48: whole blocks of both would end at 48."""
    path = tiny_model("gemma3", tmp_path_factory.getbasetemp())
    sizes = {"block_size_by_kind": {"full": 48, "window": 16}, "placement": "packed"}
    cold, _, _ = tokens(path, prefix_caching=False, **sizes)
    whole, few, _ = tokens(path, partial_reuse="false", **sizes)
    warm, hits, _ = tokens(path, **sizes)
    assert few == [0, 48, 48, 0, 0]
    assert hits == [0, 53, 84, 41, 47]
    assert whole == warm == cold
