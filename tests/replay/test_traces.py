"""Readers: what a line says, and what is refused with its number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.replay.arrival import Arrival
from kvcore.replay.tokens import RUN, TokenSource, named_tokens
from kvcore.replay.trace import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
MOONCAKE = {"timestamp": 1500, "input_length": 513, "output_length": 7, "hash_ids": [4, 9]}


def test_azure_by_hand(cut) -> None:
    trace = cut("azure_conv_300.csv")
    # 18:15:46.6805900, 374 in, 44 out; 18:15:50.9951690, 396 in, 109 out.
    assert trace.arrivals[0] == Arrival(0.0, 374, 44)
    assert trace.arrivals[1][1:] == (396, 109, None)
    assert trace.arrivals[1].second == pytest.approx(4.314579, abs=1e-6)
    assert (len(trace.arrivals), trace.has_prefixes) == (300, False)


def test_mooncake_by_hand(cut) -> None:
    trace = cut("mooncake_conversation_200.jsonl")
    assert trace.arrivals[0] == Arrival(0.0, 6758, 500, tuple(range(14)))
    assert (len(trace.arrivals), trace.has_prefixes) == (200, True)


def test_the_earliest_come_first_and_count_from_zero(tmp_path: Path) -> None:
    late, early = {**MOONCAKE, "timestamp": 3000}, {**MOONCAKE, "timestamp": 2500, "input_length": 600}
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(late)}\n\n{json.dumps(early)}\n")
    assert [(a.second, a.prompt_tokens) for a in read_trace(path).arrivals] == [(0.0, 600), (0.5, 513)]
    assert [a.prompt_tokens for a in read_trace(path, limit=1).arrivals] == [600]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "a,b\r\n1,2\r\n", "line 1"),
        ("t.csv", AZURE + "2023-11-16 18:15:46.6805900,374\r\n", "line 2"),
        ("t.csv", AZURE + "2023-11-16 18:15:46.6805900,374,44\r\nyesterday,1,1\r\n", "line 3"),
        ("t.csv", AZURE + "2023-11-16 18:15:46.6805900,0,44\r\n", "prompt tokens: 0"),
        ("t.csv", AZURE + "2023-11-16 18:15:46.6805900,5,-1\r\n", "generated tokens: -1"),
        ("t.csv", AZURE, "no requests"),
        ("t.jsonl", json.dumps(MOONCAKE) + "\nnonsense\n", "line 2"),
        ("t.jsonl", json.dumps({**MOONCAKE, "hash_ids": [4]}), "2 ids, one for each 512"),
        ("t.jsonl", json.dumps({**MOONCAKE, "hash_ids": [4, -1]}), "from 0 to"),
        ("t.jsonl", json.dumps({**MOONCAKE, "timestamp": float("nan")}), "arrives at nan"),
        ("t.jsonl", json.dumps({**MOONCAKE, "timestamp": -1}), "arrives at"),
        ("t.jsonl", "[]", "line 1"),
        ("t.txt", "x", "NAME.csv, NAME.jsonl"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert says in str(caught.value)
    assert caught.value.field == "trace"


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\xfa")
    for path in (tmp_path / "t.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError) as caught:
            read_trace(path if path.suffix else path / "x.jsonl")
        assert caught.value.field == "trace"


@given(st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=6), st.data())
def test_prompts_begin_alike_exactly_where_their_ids_do(ids: list[int], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.sampled_from(ids) | st.integers(0, 2**48 - 1), min_size=1, max_size=6))
    a, b = (TokenSource().prompt(Arrival(0, RUN * len(i) - 5, 1, tuple(i))) for i in (ids, others))
    alike = next((k for k, (x, y) in enumerate(zip(ids, others, strict=False)) if x != y), min(len(ids), len(others)))
    common = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    # 512 tokens of 30 bits: two unlike runs can share a few of them only by chance.
    assert common == min(alike * RUN, len(a), len(b)) or alike * RUN < common < alike * RUN + 3


def test_tokens_of_a_run_are_fixed_and_look_random() -> None:
    def splitmix64(n: int) -> int:
        """The published generator, step n + 1 from seed 0, in Python's integers."""
        mask = 2**64 - 1
        z = (n + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    assert splitmix64(0) == 0xE220A8397B1DCDAF  # of the reference implementation
    tokens = named_tokens((3, 182_789))
    assert tokens.tolist() == [splitmix64(h * RUN + i) >> 34 for h in (3, 182_789) for i in range(RUN)]
    many = named_tokens(tuple(range(1000)))
    assert len(np.unique(many)) > 0.999 * many.size
    assert abs(many.mean() / 2**29 - 1) < 0.01


def test_fresh_tokens_never_come_twice_and_never_meet_named_ones() -> None:
    source = TokenSource()
    seen = [*source.fresh(5), *source.fresh(1), *source.fresh(3), *source.prompt(Arrival(0, 4, 1))]
    assert len(set(seen)) == len(seen) == 13
    assert min(seen) > named_tokens(tuple(range(100))).max()
