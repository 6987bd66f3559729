"""Each reason of `cache.explain`, planted in a run of the command and named in its text, its JSON and from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from models.tiny import tiny_model
from support.engines import make_llm
from tokenizers import Tokenizer, models, pre_tokenizers

from kvcore.cli import main
from kvcore.errors import RequestError

WORDS = 200
# Requests one after the other, blocks of 16 tokens.
ONE_BY_ONE = ("engine.max_num_seqs=1", "cache.block_size=16", "device=cpu", "backend=torch", "model.dtype=float32")


def words(*runs: tuple[int, int]) -> str:
    """A prompt of so many numbered words from the first one on, for each (first, count)."""
    return " ".join(f"w{first + i}" for first, count in runs for i in range(count))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A tiny model whose tokens are words ``w1``, ``w2``, and so on."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("explain") / name
        shutil.copytree(tiny_model(name, tmp_path_factory.getbasetemp()), folder)
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return folder

    return make


@pytest.fixture
def explained(capsys, folder_of):
    """The missed parts of each prompt, by a run that answers in JSON; checked against its text."""

    def run_it(model: str, blocks: int, prompts: list[str], *more: str) -> list[list[dict[str, Any]]]:
        keys = (*ONE_BY_ONE, f"model.path={folder_of(model)}", f"cache.num_blocks={blocks}", "engine.max_model_len=100")
        keys = (*keys, "cache.explain=true", "sampling.max_tokens=1", "sampling.ignore_eos=true", *more)
        texts = [word for prompt in prompts for word in ("--prompt", prompt)]
        assert main(["run", *keys, *texts, "output=json"]) == 0
        outputs = json.loads(capsys.readouterr().out)["outputs"]
        assert main(["run", *keys, *texts]) == 0
        said = capsys.readouterr().out
        for prompt, output in zip(prompts, outputs, strict=True):
            told = output["explain"]
            assert told["prompt_tokens"] == len(prompt.split())
            assert told["hit_tokens"] == output["num_cached_tokens"]
            assert told["hit_tokens"] + sum(m["tokens"] for m in told["missed"]) == told["prompt_tokens"]
            for missed in told["missed"]:
                assert (
                    f"{missed['tokens']} from token {missed['start']} on: {missed['reason']}, {missed['text']}" in said
                )
        return [output["explain"]["missed"] for output in outputs]

    return run_it


def test_never_cached_token_and_granularity(explained) -> None:
    """Both ids of the first token that differs, and what a whole block takes with it."""
    first, second = explained("llama", 30, [words((1, 50)), words((1, 36), (100, 20))])
    assert [(m["reason"], m["start"], m["tokens"]) for m in first] == [("never_cached", 0, 48), ("granularity", 48, 2)]
    assert [(m["reason"], m["start"], m["tokens"]) for m in second] == [
        ("granularity", 32, 4),
        ("token", 36, 12),
        ("granularity", 48, 8),
    ]
    assert (second[1]["ours"], second[1]["theirs"]) == (100, 37)


def test_with_parts_of_blocks_only_the_token_and_the_last_are_missed(explained) -> None:
    """The same prompts: what was granularity is reused. A prompt that is cached whole lacks its last token."""
    prompts = [words((1, 50)), words((1, 36), (100, 20)), words((1, 48))]
    first, second, third = explained("llama", 30, prompts, "cache.partial_reuse=true")
    assert first[0]["reason"] == "never_cached"
    assert [(m["reason"], m["start"], m["tokens"]) for m in second] == [("token", 36, 19), ("granularity", 55, 1)]
    assert [(m["reason"], m["start"], m["tokens"]) for m in third] == [("granularity", 47, 1)]


def test_salt(explained) -> None:
    """The second prompt is of another tenant, the third of the same."""
    _, missed, again = explained("llama", 30, [words((1, 50))] * 3, "salts=[a,b,b]")
    assert [m["reason"] for m in again] == ["granularity"]
    assert [(m["reason"], m["tokens"]) for m in missed] == [("salt", 48), ("granularity", 2)]


def test_evicted_when_and_for_whom(explained) -> None:
    """Seven blocks: the second prompt takes two of the four of the first, the tail first."""
    _, _, missed = explained("llama", 8, [words((1, 64)), words((100, 70)), words((1, 64))])
    assert [(m["reason"], m["start"]) for m in missed] == [("evicted", 32), ("granularity", 48)]
    assert missed[0]["request"] == "r2"
    assert missed[0]["step"] == 2


def test_the_group_that_vetoes(explained) -> None:
    """Full layers still have the prefix; the windows have given theirs to somebody else."""
    *_, missed = explained("gemma3", 48, [words((1, 90)), words((100, 60)), words((1, 40))])
    assert [(m["reason"], m["start"], m["tokens"]) for m in missed] == [("window", 0, 32), ("granularity", 32, 8)]
    assert (missed[0]["group"], missed[0]["request"]) == (0, "r2")
    assert "group 0 lacks a block" in missed[0]["text"]


def test_from_python(folder_of) -> None:
    llm = make_llm(folder_of("llama"), explain=True, num_blocks=30, block_size=16, max_num_seqs=1, max_model_len=100)
    told = [output.explanation for output in llm.generate([words((1, 50))] * 2)]
    assert [t.by_reason() for t in told] == [{"never_cached": 48, "granularity": 2}, {"granularity": 2}]
    assert (told[1].hit_tokens, told[1].prompt_tokens) == (48, 50)
    tenants = [o.explanation.by_reason() for o in llm.generate([words((1, 50))] * 2, salts=["a", "b"])]
    assert tenants == [{"salt": 48, "granularity": 2}] * 2
    with pytest.raises(RequestError, match="one salt a prompt"):
        llm.generate([words((1, 50))], salts=["a", "b"])
    with pytest.raises(RequestError, match="no salt"):
        llm.generate([words((1, 50))], salts=["a\0b"])
    (plain,) = make_llm(folder_of("llama"), num_blocks=30, max_model_len=100).generate([words((1, 20))])
    assert plain.explanation is None
