"""When things happen in a replay, against a simulation written for the tests; and who is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replays import DATA, LLAMA, make_replay

from kvcore.errors import CapacityError
from kvcore.replay.arrival import Arrival
from kvcore.replay.step_cost import StepCost
from kvcore.replay.summary import quantiles, summarize
from kvcore.replay.trace import Trace

# Dyadic, so that sums of them are exact.
COST = StepCost(2.0**-5, 2.0**-12)
BUDGET, SEQS, LONGEST = 16, 3, 60
GPT_OSS = DATA / "hf_configs/openai--gpt-oss-120b_config.json"


@dataclass
class Person:
    """A request of the simulation."""

    arrival: Arrival
    known: int
    computed: int = 0
    first: float | None = None
    end: float = 0.0


def simulate(arrivals: list[Arrival]) -> list[tuple[float, float | None, float]]:
    """(arrived, first token, end) of each, in order of arrival: no cache, no blocks, nobody short of room."""
    coming = [Person(a, a.prompt_tokens) for a in arrivals if a.prompt_tokens < LONGEST]
    everybody, waiting, running = list(coming), [], []
    now = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival.second)
        while coming and coming[0].arrival.second <= now:
            waiting.append(coming.pop(0))
        left, members = BUDGET, []
        for person in running:
            count = min(person.known - person.computed, left)
            left -= count
            members.append((person, count))
        while waiting and left and len(running) < SEQS:
            person = waiting.pop(0)
            running.append(person)
            count = min(person.known, left)
            left -= count
            members.append((person, count))
        now += COST.step_seconds + COST.token_seconds * (BUDGET - left)
        for person, count in members:
            person.computed += count
            if count and person.computed == person.known:
                person.known += 1
                person.first = person.first or now
                outputs = person.known - person.arrival.prompt_tokens
                if outputs == person.arrival.output_tokens or person.known == LONGEST:
                    person.end = now
                    running.remove(person)
    return [(p.arrival.second, p.first, p.end) for p in everybody]


# Eighths of a second: a step ends exactly when somebody comes.
arrivals = st.lists(
    st.builds(
        Arrival, st.integers(0, 24).map(lambda n: n / 8), st.integers(1, LONGEST + 2), st.integers(1, 12), st.none()
    ),
    min_size=1,
    max_size=12,
).map(lambda them: sorted(them, key=lambda a: a.second))


@given(arrivals)
@settings(max_examples=60)
def test_tokens_come_when_the_simulation_says(them: list[Arrival]) -> None:
    replay = make_replay(
        Trace("test", tuple(them)),
        cost=COST,
        num_blocks=500,
        block_size=16,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQS,
        max_model_len=LONGEST,
    )
    replay.run()
    assert sorted((s.arrived, s.first_token, s.ended) for s in replay.served) == sorted(simulate(them))
    assert len(replay.refused) == sum(a.prompt_tokens >= LONGEST for a in them)


def test_times_by_hand() -> None:
    """Two requests: 20 ms a step and 20 us a token, 100 + 1 tokens, then 1 + 1."""
    trace = Trace("test", (Arrival(0.0, 100, 2), Arrival(0.001, 1, 3)))
    replay = make_replay(trace, num_blocks=100, block_size=16)
    replay.run()
    first, second = replay.served
    assert (first.first_token, first.ended) == pytest.approx((0.022, 0.022 + 0.02004))
    assert (second.first_token, second.ended) == pytest.approx((0.04204, 0.04204 + 2 * 0.02002))
    assert (replay.steps, replay.seconds) == (4, second.ended)
    assert summarize(replay, 16)["hit_rate"] is None


def test_one_by_one_nobody_waits() -> None:
    """Each request comes when it came, or when the one before it ended."""
    trace = Trace("test", (Arrival(0.0, 100, 1), Arrival(0.001, 100, 1), Arrival(5.0, 100, 1)))
    replay = make_replay(trace, num_blocks=100, block_size=16, pace="one_by_one")
    replay.run()
    assert [s.arrived for s in replay.served] == pytest.approx([0, 0.022, 5])
    assert [s.ended for s in replay.served] == pytest.approx([0.022, 0.044, 5.022])


def test_whoever_can_never_be_served_is_refused_and_counted() -> None:
    trace = Trace("test", tuple(Arrival(0.0, n, 5) for n in (10, 62, 63, 64, 1000)))
    replay = make_replay(trace, num_blocks=100, block_size=16, max_model_len=64)
    replay.run()
    summary = summarize(replay, 16)
    assert (summary["requests"], summary["refused"], len(replay.served)) == (5, 2, 3)
    # The longest sequence ends what it began: 62 + 2, 63 + 1.
    assert sorted(s.output_tokens for s in replay.served) == [1, 2, 5]


@pytest.mark.parametrize("config", [LLAMA, GPT_OSS], ids=["full", "window and full"])
def test_every_length_that_fits_by_plan_is_served_and_no_other(config: Path) -> None:
    """At each size of the arena, alone and beside others: nobody waits for ever."""
    for blocks in range(3, 40):
        keys = {"config": config, "num_blocks": blocks, "block_size": 16, "max_num_batched_tokens": 32}
        longest = make_replay(Trace("test", (Arrival(0.0, 1, 1),)), **keys).scheduler.max_model_len
        lengths = range(max(1, longest - 40), longest + 2)
        trace = Trace("test", tuple(Arrival(0.0, n, 3) for n in lengths))
        for pace in ("one_by_one", "trace"):
            replay = make_replay(trace, pace=pace, **keys)
            replay.run()
            assert len(replay.served) + len(replay.refused) == len(lengths)
            assert not any(s.failed for s in replay.served)
            assert {a.prompt_tokens for a in replay.refused} == {longest, longest + 1}


def test_an_arena_without_room_for_two_tokens_is_refused() -> None:
    with pytest.raises(CapacityError):
        make_replay(Trace("test", (Arrival(0.0, 1, 1),)), config=GPT_OSS, num_blocks=2, block_size=16)


def test_quantiles_by_hand() -> None:
    assert quantiles([]) == {"p50": None, "p90": None, "p99": None, "max": None}
    assert quantiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert quantiles([float(n) for n in range(200, 0, -1)]) == {"p50": 100, "p90": 180, "p99": 198, "max": 200}
