"""Each fault that `cache.sanitize` is for, planted, and named with all that is known; none where all is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models.tiny import tiny_model
from support.engines import make_llm
from support.replays import DATA, make_replay

from kvcore.engine.llm import LLM
from kvcore.engine.sampling import SamplingParams
from kvcore.errors import IntegrityError
from kvcore.memory import aliasing
from kvcore.replay.arrival import Arrival
from kvcore.replay.replay import Replay
from kvcore.replay.summary import summarize
from kvcore.replay.trace import Trace, read_trace
from kvcore.worker import cache_engine

SIZED = {"num_blocks": 200, "block_size": 16, "max_model_len": 1024, "sanitize": True}
GPT_OSS = DATA / "hf_configs/openai--gpt-oss-120b_config.json"
TIMES = ("seconds", "events_per_second")


def running(replay: Replay, steps: int) -> Replay:
    """The replay after some steps."""
    replay._take_arrivals()
    for _ in range(steps):
        replay._step()
    return replay


@pytest.fixture
def replay() -> Replay:
    """Three requests, far from their ends; each has written 3 tokens into its last block."""
    trace = Trace("test", tuple(Arrival(0.0, 48, 100) for _ in range(3)))
    return running(make_replay(trace, **SIZED), 4)


def table(replay: Replay, name: str) -> list[int]:
    row = replay.scheduler.requests[name][0].row
    return replay.scheduler.manager.table(row, 0)[1]


def told(step: Callable[[], object]) -> str:
    with pytest.raises(IntegrityError) as caught:
        step()
    assert caught.value.field == "cache.sanitize"
    return str(caught.value)


def test_a_block_that_is_freed_while_a_table_names_it(replay: Replay) -> None:
    block = table(replay, "r1")[1]
    replay.scheduler.manager._pool.release(np.array([block]), 4)
    said = told(replay._step)
    assert f"a block is freed while a table names it: block {block} of group 0 (layers L0, L1, " in said
    assert "freed before step 5, named by the tables of 'r1', 16 of 16 slots written" in said


def test_a_block_that_is_handed_out_while_a_table_names_it(replay: Replay, monkeypatch) -> None:
    """A pool that lost count: the next request is given a block that another one is writing."""
    block, pool = table(replay, "r2")[-1], replay.scheduler.manager._pool
    take = pool.take
    monkeypatch.setattr(pool, "take", lambda groups: np.append(take(groups)[1:], block).astype(np.int32))
    replay._tokens.fresh(5)
    replay.scheduler.add(_request(replay, "late"))
    said = told(replay._step)
    assert f"a block is handed out while a table names it: block {block} of group 0" in said
    assert "named by the tables of 'r2', 3 of 16 slots written" in said


def test_two_requests_that_write_one_block(replay: Replay, monkeypatch) -> None:
    """A step that gives one new block to two requests."""
    pool = replay.scheduler.manager._pool
    take = pool.take
    monkeypatch.setattr(pool, "take", lambda groups: take(groups)[:1].repeat(len(groups)))
    running(replay, 13)  # up to the step before each of the three needs a block
    said = told(replay._step)
    assert "a block is written while several tables name it" in said
    assert "named by the tables of 'r0', 'r1', 'r2'" in said


def test_a_read_of_a_slot_that_was_never_written(replay: Replay) -> None:
    """An index that finds a block which is not full."""
    manager = replay.scheduler.manager
    row = replay.scheduler.requests["r0"][0].row
    first = manager.requests.chain(row).digests[0]
    partial = table(replay, "r1")[-1]
    manager._prefixes.cache._index[0][first] = partial
    prompt = manager.requests.tokens.view(row)[:20].tolist()
    replay.scheduler.add(_request(replay, "late", prompt))
    said = told(replay._step)
    assert f"a step reads a slot that was never written: block {partial} of group 0" in said
    assert "'r1', 'late'" in said
    assert "3 of 16 slots written" in said


def test_a_token_that_is_skipped(replay: Replay) -> None:
    manager, row = replay.scheduler.manager, replay.scheduler.requests["r0"][0].row
    execute = replay._executor.execute

    def skip(output):
        output.computed[output.rows == row] += 1
        return execute(output)

    replay._executor.execute = skip  # type: ignore[method-assign]
    said = told(replay._step)
    assert f"a step reads a slot that was never written: block {manager.table(row, 0)[1][-1]}" in said


def test_a_slot_that_is_written_twice(replay: Replay) -> None:
    row, execute = replay.scheduler.requests["r0"][0].row, replay._executor.execute

    def back(output):
        output.computed[output.rows == row] -= 1
        return execute(output)

    replay._executor.execute = back  # type: ignore[method-assign]
    assert "a step writes a slot that is written already" in told(replay._step)


def _request(replay: Replay, name: str, prompt: list[int] | None = None):
    from kvcore.engine.request import Request

    ids = tuple(prompt or replay._tokens.fresh(20))
    return Request(name, ids, SamplingParams(max_tokens=3, ignore_eos=True), 99)


# ---- what kernels are given


@pytest.fixture
def llm(tmp_path_factory) -> LLM:
    """A real model with two requests that run."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    llm = make_llm(path, sanitize=True, max_model_len=96, num_blocks=14, max_num_batched_tokens=64, max_num_seqs=6)
    for name, token in (("one", 5), ("two", 11)):
        llm.core.add_request(name, [token] * 20, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        llm.core.step()
    return llm


@pytest.mark.parametrize(("column", "what"), [(-1, "writes"), (0, "reads")])
def test_a_stale_table(llm: LLM, column: int, what: str) -> None:
    """The device's table of "one" still names a block of "two"."""
    one, two = (llm.core.scheduler.requests[name][0].row for name in ("one", "two"))
    cache = llm.core.executor.worker.runner.cache
    other = llm.core.manager.table(two, 0)[1][column]
    place, width = cache._places[one], len(llm.core.manager.table(one, 0)[1])
    cache.tables.groups[0].rows_SN[place, range(width)[column]] = other
    said = told(llm.core.step)
    assert f"a kernel {what} through a stale table: block {other} of group 0 (layers L0, L1)" in said
    assert "named by the tables of 'two'" in said


def test_an_engine_goes_on_after_a_fault_was_named(llm: LLM) -> None:
    row = llm.core.scheduler.requests["one"][0].row
    cache = llm.core.executor.worker.runner.cache
    cache.tables.groups[0].rows_SN[cache._places[row], 0] = 9
    told(llm.core.step)
    request = llm.core.add_request("next", [7] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
    while llm.core.has_unfinished:
        llm.core.step()
    assert request.num_outputs == 5


def test_an_aliasing_view(tmp_path_factory, monkeypatch) -> None:
    """The second layer's keys lie where the first layer's do."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    real, first = cache_engine.field_tensors, {}

    def aliased(arena, config, cache):
        tensors = real(arena, config, cache)
        first.setdefault("k", tensors["k"])
        return {**tensors, "k": first["k"]}

    monkeypatch.setattr(cache_engine, "field_tensors", aliased)
    make_llm(path, num_blocks=14, max_model_len=64)  # without the key nobody looks
    first.clear()
    said = told(lambda: make_llm(path, sanitize=True, num_blocks=14, max_model_len=64))
    assert "two views share memory: L0.k, block 0, and L1.k, block 0" in said


def test_half_a_block_of_overlap_is_seen() -> None:
    """Blocks of one view that reach into the next one: a stride that is too small."""
    import torch

    whole = torch.zeros(4, 8)
    starts, length = aliasing._runs(whole[:, ::2][1])
    assert (len(starts), length) == (4, 4)
    starts, length = aliasing._runs(whole[1])
    assert (len(starts), length) == (1, 32)
    starts, length = aliasing._runs(whole[:, :4].t())
    assert (len(starts), length) == (4, 16)


# ---- where all is right


@pytest.mark.parametrize("config", [None, GPT_OSS], ids=["full", "window and full"])
@pytest.mark.parametrize("blocks", [2500, 4000])
def test_nothing_is_found_and_nothing_changes_where_all_is_right(config: Path | None, blocks: int) -> None:
    """Prefix hits, evictions, preemptions and windows of a real trace; equal figures with and without."""
    trace, found = read_trace(DATA / "traces/mooncake_synthetic_200.jsonl", 60), []
    for sanitize in (False, True):
        keys = {"num_blocks": blocks, "block_size": 64, "sanitize": sanitize, "most_output": 40}
        replay = make_replay(trace, **keys, **({"config": config} if config else {}))
        replay.run()
        summary = summarize(replay, 64)
        found.append(({k: v for k, v in summary.items() if k not in TIMES}, replay.series.samples))
        assert summary["cached_tokens"] > 0 or blocks < 4000
        assert summary["evictions"] > 0
    assert found[0] == found[1]
