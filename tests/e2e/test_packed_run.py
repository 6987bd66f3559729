"""The same tokens from `cache.placement=packed` as from `slots`: the default model, and windows beside full layers."""

from __future__ import annotations

import json

import pytest
from models.tiny import tiny_model
from support.engines import make_llm

from kvcore.cli import main
from kvcore.engine.sampling import SamplingParams

PROMPTS = ("What is the capital of France?", "Count: one, two,")


def test_the_command_says_the_same(smollm2, capsys) -> None:
    said = {}
    for placement in ("slots", "packed"):
        words = [
            "device=cpu",
            "cache.memory=64MiB",
            "engine.max_model_len=512",
            f"cache.placement={placement}",
            "sampling.max_tokens=6",
        ]
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        assert main(["run", *words, "output=json", *prompts]) == 0
        run = json.loads(capsys.readouterr().out)
        assert run["plan"]["placement"] == placement
        said[placement] = [output["token_ids"] for output in run["outputs"]]
    assert said["packed"] == said["slots"]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_full_and_window_layers_say_the_same(name: str, tmp_path_factory) -> None:
    """Many requests in a small arena: pages change owners, and requests are preempted."""
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    texts, plans = {}, {}
    for placement in ("slots", "packed"):
        asked = {"max_model_len": 96, "max_num_batched_tokens": 40, "max_num_seqs": 6, "placement": placement}
        needed = make_llm(path, **asked).plan.needed_bytes
        llm = make_llm(path, **asked, memory=2 * needed)
        requests = [
            llm.core.add_request(
                f"r{i}",
                [1 + (7 * i + j) % 200 for j in range(8 + 5 * i)],
                SamplingParams(max_tokens=12, ignore_eos=True),
            )
            for i in range(8)
        ]
        while any(r.finish_reason is None for r in requests):
            llm.core.step()
        llm.core.manager.check_integrity()
        texts[placement], plans[placement] = [r.tokens for r in requests], llm.plan.configs[0].placement
    assert plans == {"slots": "slots", "packed": "packed"}
    assert texts["packed"] == texts["slots"]
