"""Hits of the real manager on published traces, against counters that know nothing of it."""

from __future__ import annotations

import pytest
from support.lru_oracle import BLOCK, hit_blocks
from support.replays import make_replay

from kvcore.replay.replay import Replay
from kvcore.replay.summary import summarize
from kvcore.replay.trace import Trace, read_trace

CUTS = ("mooncake_conversation_200.jsonl", "mooncake_synthetic_200.jsonl")
SIZES = (400, 1000, 2000, 4000)


def one_by_one(trace: Trace, blocks: int) -> Replay:
    """Each request ends before the next one comes; one step each, and one token."""
    replay = make_replay(
        trace, pace="one_by_one", most_output=1, block_size=BLOCK, num_blocks=blocks + 1, max_num_batched_tokens=262144
    )
    replay.run()
    return replay


def infinite(trace: Trace) -> tuple[int, int]:
    """Hit blocks and blocks, when nothing is ever forgotten: the ten-line counter."""
    seen: set[int] = set()
    hits = blocks = 0
    for arrival in trace.arrivals:
        ids = arrival.hash_ids
        for h in ids[: (arrival.prompt_tokens - 1) // BLOCK]:
            if h not in seen:
                break
            hits += 1
        blocks += len(ids)
        seen.update(ids[: arrival.prompt_tokens // BLOCK])
    return hits, blocks


@pytest.mark.parametrize("name", CUTS)
def test_an_infinite_cache_hits_what_the_counter_counts(cut, name: str) -> None:
    trace = cut(name)
    hits, blocks = infinite(trace)
    replay = one_by_one(trace, 10_000)
    assert summarize(replay, BLOCK)["block_hit_rate"] == hits / blocks
    assert sum(s.cached_tokens for s in replay.served) == hits * BLOCK
    assert hits > 300


@pytest.mark.parametrize("name", CUTS)
def test_finite_caches_hit_as_a_list_of_ids_does_request_by_request(cut, name: str) -> None:
    trace, rates = cut(name), []
    for size in SIZES:
        replay = one_by_one(trace, size)
        assert [s.cached_tokens // BLOCK for s in replay.served] == list(hit_blocks(trace.arrivals, size)), size
        rates.append(summarize(replay, BLOCK)["block_hit_rate"])
    hits, blocks = infinite(trace)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] <= hits / blocks


@pytest.mark.parametrize(
    ("name", "percent"), [("mooncake_fast25_conversation.jsonl", 36.60), ("mooncake_fast25_synthetic.jsonl", 63.79)]
)
def test_the_whole_traces_have_their_known_rates(shared_data, name: str, percent: float) -> None:
    trace = read_trace(shared_data / "traces" / name)
    replay = one_by_one(trace, 400_000)
    rate = summarize(replay, BLOCK)["block_hit_rate"]
    hits, blocks = infinite(trace)
    assert rate == hits / blocks
    assert round(100 * rate, 2) == percent
    assert len(replay.served) == len(trace.arrivals)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "percent"), [("mooncake_fast25_conversation.jsonl", 36.60), ("mooncake_fast25_synthetic.jsonl", 63.79)]
)
def test_finite_caches_come_up_to_the_known_rates(shared_data, name: str, percent: float) -> None:
    trace, rates = read_trace(shared_data / "traces" / name), []
    for size in (1_000, 4_000, 16_000, 64_000, 256_000):
        replay = one_by_one(trace, size)
        assert [s.cached_tokens // BLOCK for s in replay.served] == list(hit_blocks(trace.arrivals, size)), size
        rates.append(round(100 * summarize(replay, BLOCK)["block_hit_rate"], 2))
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] == percent
