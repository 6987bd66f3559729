"""Every prompt token of a trace was reused or has a reason, request by request."""

from __future__ import annotations

import tracemalloc

import pytest
from support.lru_oracle import BLOCK, hit_blocks
from support.replays import make_replay

from kvcore.manage.explain.content_tree import ContentTree
from kvcore.manage.explain.eviction_log import EvictionLog
from kvcore.replay.replay import Replay
from kvcore.replay.summary import summarize
from kvcore.replay.trace import Trace, read_trace

CUTS = ("mooncake_conversation_200.jsonl", "mooncake_synthetic_200.jsonl")
WHOLE = ("mooncake_fast25_conversation.jsonl", "mooncake_fast25_synthetic.jsonl")
REASONS = {"token", "never_cached", "not_computed", "evicted", "granularity"}


def check(replay: Replay, trace: Trace) -> dict[str, int]:
    """Run it; returns tokens by reason."""
    replay.run()
    assert len(replay.served) + len(replay.refused) == len(trace.arrivals)
    for served in replay.served:
        assert served.missed is not None
        assert served.cached_tokens + sum(served.missed.values()) == served.prompt_tokens
    told = summarize(replay, 64)["missed_by_reason"]
    assert sum(told.values()) + replay.scheduler.stats.cached_tokens == replay.scheduler.stats.prompt_tokens
    assert set(told) <= REASONS
    return told


@pytest.mark.parametrize("name", CUTS)
def test_under_load_with_preemptions(cut, name: str) -> None:
    """A cache of 2 GiB beside 2048 tokens a step: evictions for others, requests that run beside each other."""
    trace = cut(name)
    told = check(make_replay(trace, memory=6 << 30, block_size=64, explain=True, most_output=100), trace)
    assert min(told["evicted"], told["never_cached"], told["granularity"]) > 0


@pytest.mark.parametrize("name", [pytest.param(WHOLE[0], marks=pytest.mark.long), WHOLE[1]])
def test_whole_traces(shared_data, name: str) -> None:
    trace = read_trace(shared_data / "traces" / name)
    keys = {"block_size": BLOCK, "num_blocks": 4001, "max_num_batched_tokens": 262144}
    history = {"explain": True, "explain_history": 400_000}  # no eviction of the trace is forgotten
    told = check(make_replay(trace, pace="one_by_one", most_output=1, **keys, **history), trace)
    # One after the other, what a larger cache would have hit was evicted: block by block.
    hits = sum(hit_blocks(trace.arrivals, 400_000)) - sum(hit_blocks(trace.arrivals, 4000))
    assert told["evicted"] == hits * BLOCK
    assert "not_computed" not in told


@pytest.mark.parametrize("block_size", [16, 64])
def test_what_explaining_takes_a_block(block_size: int) -> None:
    """Besides the token ids (4 bytes each), at most 96 bytes a cached block and 96 a remembered eviction."""
    blocks, history = 50_000, 50_000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = ContentTree(blocks, block_size)
    for block in range(1, blocks):
        tree.add(block, block // 2, (block,) * block_size)
    tree_bytes = tracemalloc.get_traced_memory()[0] - before
    before = tracemalloc.get_traced_memory()[0]
    log = EvictionLog(history)
    names = [f"request {i}" for i in range(history // 100)]
    for i in range(2 * history // 100):
        digests = [(100 * i + j).to_bytes(8, "big") * 4 for j in range(100)]
        log.add([0] * 100, digests, "evicted", i, [names[i % len(names)]] * 100)
    log_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert tree_bytes / blocks <= 96 + 4 * block_size
    assert log_bytes / history <= 96
    # The older half was overwritten, the newer is found.
    found = log.find(0, [n.to_bytes(8, "big") * 4 for n in range(2 * history)])
    assert [f is not None for f in found] == [False] * history + [True] * history
    assert found[-1].step == 2 * history // 100 - 1
    assert log.find(1, [(2 * history - 1).to_bytes(8, "big") * 4]) == [None]
