"""An engine with one token whose embedding is NaN, and ways to make any phase of a step fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore.engine.llm import LLM
from kvcore.engine.settings import SamplingParams
from support.engines import make_llm

BAD = 77  # the token whose embedding is NaN
LIMITS = {"num_blocks": 60, "max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6}
PROBE = [5, 9, 200, 31, 7, 7, 12, 40, 41, 42, 43, 44, 45, 46, 47, 48, 3]
PHASES = ("lookup", "allocate", "rows", "tables", "model", "sample", "append", "fork", "commit", "sink", "observers")


class Ids:
    """A tokenizer of texts that are numbers."""

    eos_token_ids = ()

    def encode(self, text: str, chat: bool) -> list[int]:
        return [int(t) for t in text.split()]

    def detokenizer(self) -> Any:
        return self

    def push(self, token: int) -> str:
        return "x"

    def finish(self) -> str:
        return ""

    rest = finish


def engine(path: Path, **keys: Any) -> LLM:
    llm = make_llm(path, **(LIMITS | keys))
    with torch.no_grad():
        llm.core.executor.worker.model.module.get_input_embeddings().weight[BAD] = float("nan")
    return llm


def drain(llm: LLM) -> None:
    for _ in range(1000):
        if not llm.core.has_unfinished:
            return
        llm.core.step()
    raise AssertionError("the engine goes on for ever")


def answer(llm: LLM, name: str = "probe", prompt: list[int] = PROBE, count: int = 6) -> list[int]:
    request = llm.core.add_request(name, prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    while request.finish_reason is None:
        llm.core.step()
    assert request.finish_reason == "length"
    return request.output_ids


def nothing_leaks(llm: LLM) -> None:
    core, runner = llm.core, llm.core.executor.worker.runner
    core.manager.check_integrity()
    stats = core.manager.stats()
    assert (stats["blocks_used"], stats["blocks_pending"], stats["requests"]) == (0, 0, 0)
    assert core.manager.steps_in_flight == ()
    assert not (core.scheduler.requests)
    assert not (core.scheduler.waiting)
    assert not (core.scheduler.running)
    assert not (core.scheduler._live)
    assert not llm._kept
    rows = set(runner.cache.rows)
    assert rows <= set(core.scheduler._dropped)  # rows are dropped with the next step
    assert set(runner.texts._texts) <= rows
    assert len(rows) + len(runner.cache._free) == LIMITS["max_num_seqs"]


def failing(llm: LLM, monkeypatch: pytest.MonkeyPatch, phase: str, error: BaseException) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    core, runner = llm.core, llm.core.executor.worker.runner
    places: dict[str, tuple[object, str]] = {
        "lookup": (core.manager, "lookup"),
        "allocate": (core.manager, "allocate"),
        "evict": (core.manager._pool, "_on_evict"),
        "rows": (core.scheduler, "_count_admission"),
        "tables": (runner.cache.tables, "apply_step"),
        "model": (runner.model, "forward"),
        "sample": (runner, "sample"),
        "append": (core.scheduler, "_take_in"),
        "fork": (core.manager, "fork"),
        "commit": (core.manager._prefixes, "register"),
        "sink": (runner, "logits_sink"),
        "observers": (core.registry, "step_finished"),
    }
    target, name = places[phase]
    monkeypatch.setattr(target, name, fail)
