"""Requests come, fork, fail, are aborted, in any order and number: whoever asks afterwards gets the right text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from models.tiny import tiny_model
from support.serving import BAD, PHASES, PROBE, answer, drain, engine, failing, nothing_leaks

from kvcore.engine.llm import LLM
from kvcore.engine.settings import SamplingParams


def operations(llm: LLM, rng: random.Random) -> Iterator[Callable[[], Any]]:
    core, names = llm.core, (f"r{i}" for i in range(1 << 30))

    def add() -> None:
        prompt = [rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 40))]
        if rng.random() < 0.3:
            prompt = [*PROBE, *prompt]  # what goes wrong with its blocks, the next probe meets
        if rng.random() < 0.15:
            prompt[rng.randrange(len(prompt))] = BAD
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 12),
            n=rng.choice([1, 1, 2, 3]),
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=rng.random() < 0.5,
        )
        core.add_request(next(names), prompt, sampling)

    def score() -> None:
        forced = [rng.randint(1, 60) for _ in range(rng.randint(0, 9))]
        core.add_request(next(names), [4, 5], SamplingParams(), forced=forced, keep_logits=rng.random() < 0.5)

    def end_one() -> None:
        if core.scheduler.running:
            core.end(rng.choice(core.scheduler.running), "stop")

    def abort_all() -> None:
        core.abort(rng.choice([*core.scheduler.requests, "nobody"]))

    def step_that_fails() -> None:
        phase = rng.choice(PHASES)
        error = rng.choice([RuntimeError("no"), KeyboardInterrupt(), ValueError("no")])
        with pytest.MonkeyPatch.context() as patch:
            failing(llm, patch, phase, error)
            try:
                core.step()
            except type(error) as raised:
                if raised is not error:
                    raise

    kinds = [add, add, score, end_one, step_that_fails, abort_all]
    while True:
        yield core.step if rng.random() < 0.6 else rng.choice(kinds)


@pytest.mark.parametrize(("seed", "count"), [(1, 2000), pytest.param(2, 10_000, marks=pytest.mark.long)])
def test_random_operations(tmp_path_factory: pytest.TempPathFactory, seed: int, count: int) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    want, llm, rng = answer(engine(path)), engine(path, partial_reuse="true"), random.Random(seed)
    stream, reasons = operations(llm, rng), set()
    for i in range(1, count + 1):
        for new in next(stream)() or ():
            reasons.add(new.request.finish_reason)
        if i % 100 == 0:
            assert answer(llm, f"probe{i}") == want
            llm.core.manager.check_integrity()
    drain(llm)
    nothing_leaks(llm)
    assert reasons >= {"error", "length", None}
