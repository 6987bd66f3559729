"""The page "Build an engine on the cache": both of its programs run, and the engine gives transformers' tokens."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from models.tiny import tiny_model
from support.mt_bench import short_turns
from support.tiny_transformers import random_prompts
from support.tutorial import BLOCK

ENGINE = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 256}


@pytest.fixture(scope="module")
def blocks(repo: Path) -> list[tuple[str, str]]:
    """(caption, code) of each piece of Python."""
    page = (repo / "docs" / "build-an-engine.md").read_text()
    found = [(m.group(3), m.group(4)) for m in BLOCK.finditer(page) if m.group(2) == "python"]
    assert len(found) == 3
    return found


@pytest.fixture(scope="module")
def small_engine(blocks: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The engine of the page as a module."""
    (name, code), *_ = blocks
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60
    file = tmp_path_factory.mktemp("engine") / name
    file.write_text(code)
    spec = spec_from_file_location("small_engine", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(engine, prompts, most):
    jobs = [engine.add(prompt, most) for prompt in prompts]
    while engine.waiting or engine.running:
        engine.step()
    engine.manager.check_integrity()
    assert engine.manager.stats()["blocks_used"] == 0
    assert engine.cache.rows == []
    return [job.tokens for job in jobs]


def answers(path, prompts, most):
    """One by one, by transformers' own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    how = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([p]), **how)[0].tolist() for p in prompts]


def test_a_real_model_answers_real_prompts(small_engine):
    from transformers import AutoTokenizer

    from kvcore.models.home import ensure_model

    path = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    prompts = [tokenizer(text)["input_ids"] for text in short_turns(3)]
    engine = small_engine.Engine(path, backend="torch", cache={"num_blocks": 100}, engine=ENGINE)
    assert run(engine, prompts, 12) == answers(path, prompts, 12)


@pytest.mark.parametrize(("name", "num_blocks"), [("gpt_oss", 22), ("mistral_window", 12)])
def test_it_preempts_and_reuses(small_engine, name, num_blocks, tmp_path_factory):
    path = tiny_model(name, tmp_path_factory.getbasetemp())
    prompts = random_prompts(8, seed=3)
    prompts += [prompts[0] + [7], prompts[1] + [8]]
    limits = ENGINE | {"max_model_len": 96}
    engine = small_engine.Engine(path, backend="torch", cache={"num_blocks": num_blocks}, engine=limits)
    taken, begin = [], engine.manager.begin
    engine.manager.begin = lambda tokens: taken.append(len(tokens)) or begin(tokens)
    want = answers(path, prompts, 14)
    assert run(engine, prompts, 14) == want
    assert len(taken) > len(prompts)  # somebody began anew
    assert run(engine, prompts[-2:], 14) == want[-2:]
    assert engine.manager.stats()["prefix_hit_tokens"] > 0


def test_the_example_on_foreign_memory_runs(blocks):
    code = blocks[2][1]
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[0].endswith("bytes in blocks of 16 tokens")
    assert told.splitlines()[1] == "torch.Size([20, 4, 64]) at positions 19"
    space: dict[str, object] = {}
    exec(compile(code, "docs/build-an-engine.md", "exec"), space)
    cache, pool = space["cache"], space["pool"]
    half = range(pool.data_ptr() + (32 << 20), pool.data_ptr() + (64 << 20))
    fields = [t for views in cache.memory.views.values() for t in views.values()]
    assert all(t.data_ptr() in half for t in fields)
    assert (pool[: 32 << 20] == pool[: 32 << 20].clone()).all()
