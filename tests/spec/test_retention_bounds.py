"""Retention bounds against brute force: which tokens a mask reads decides which blocks must be held."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import SpecError
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Retention, Window, touched_blocks

sizes = st.integers(1, 24)
blocks = st.integers(1, 9)
windows = st.builds(Window, sizes, st.integers(0, 12))
chunks = st.builds(Chunk, sizes)
retentions = st.one_of(st.just(Full()), windows, chunks)


def visible(retention: Retention, query: int, key: int) -> bool:
    """The mask of the design, word for word: whether the query at one position reads a key."""
    if key > query:
        return False
    if isinstance(retention, Window):
        return query - retention.size < key or key < retention.keep_first
    if isinstance(retention, Chunk):
        return key // retention.size == query // retention.size
    return True


def blocks_read(retention: Retention, queries: range, tokens: int, block_size: int) -> set[int]:
    """Blocks with a token among the first `tokens` that one of the queries reads."""
    return {k // block_size for k in range(tokens) if any(visible(retention, q, k) for q in queries)}


def held_between(retention: Retention, tokens: int, block_size: int) -> set[int]:
    """Blocks with a token that the next query, at position `tokens`, reads."""
    return blocks_read(retention, range(tokens, tokens + 1), tokens, block_size)


def held_in_step(retention: Retention, tokens: int, scheduled: int, block_size: int) -> set[int]:
    """Blocks read or written by the step whose `scheduled` tokens bring the request to `tokens`."""
    return blocks_read(retention, range(tokens - scheduled, tokens), tokens, block_size)


@given(st.integers(0, 60), blocks)
def test_a_range_touches_at_most_the_bound_and_some_range_touches_that_many(n: int, block_size: int) -> None:
    true = [len({(start + i) // block_size for i in range(n)}) for start in range(block_size)]
    assert touched_blocks(n, block_size) == max(true)


@given(retentions, st.integers(0, 70), blocks)
def test_resident_covers_what_the_next_query_reads(r: Retention, tokens: int, block_size: int) -> None:
    assert len(held_between(r, tokens, block_size)) <= r.resident_blocks(tokens, block_size)


@given(retentions, st.integers(1, 70), blocks, st.data())
def test_step_covers_what_the_step_reads_and_writes(
    r: Retention, tokens: int, block_size: int, data: st.DataObject
) -> None:
    scheduled = data.draw(st.integers(1, tokens))
    held = held_in_step(r, tokens, scheduled, block_size)
    assert len(held) <= r.blocks_for_step(tokens, scheduled, block_size)


@given(retentions, st.integers(0, 200))
def test_first_needed_is_the_first_token_any_later_query_reads(r: Retention, position: int) -> None:
    kept = r.keep_first if isinstance(r, Window) else 0
    read = [k for k in range(position + 1) if k >= kept and visible(r, position, k)]
    if read:
        assert r.first_needed(position) == min(read) or r.first_needed(position) < kept
    assert r.first_needed(position) <= r.first_needed(position + 1)


@given(st.one_of(st.just(Full()), st.builds(Window, sizes)), st.integers(1, 80), blocks)
def test_bounds_are_tight_over_all_lengths_and_schedules(r: Retention, longest: int, block_size: int) -> None:
    lengths = range(1, longest + 1)
    worst = max(len(held_between(r, n, block_size)) for n in lengths)
    assert r.resident_blocks(longest, block_size) == worst
    for scheduled in {1, longest // 2, longest} - {0}:
        worst = max(len(held_in_step(r, n, min(n, scheduled), block_size)) for n in range(1, longest + 1))
        assert r.blocks_for_step(longest, scheduled, block_size) == worst


@given(st.integers(1, 6), blocks, st.integers(1, 40))
def test_chunks_that_start_on_a_block_are_exact(chunks: int, block_size: int, scheduled: int) -> None:
    r = Chunk(chunks * block_size)
    lengths = range(1, 3 * r.size + scheduled + 1)
    longest = lengths[-1]
    worst = max(len(held_between(r, n, block_size)) for n in lengths)
    assert r.resident_blocks(longest, block_size) == worst
    worst = max(len(held_in_step(r, n, min(n, scheduled), block_size)) for n in lengths)
    assert r.blocks_for_step(longest, scheduled, block_size) == worst


@given(retentions, st.integers(1, 90), st.integers(1, 90), blocks)
def test_bounds_are_monotonic_in_length_and_schedule(r: Retention, a: int, b: int, block_size: int) -> None:
    low, high = sorted((a, b))
    assert r.resident_blocks(low, block_size) <= r.resident_blocks(high, block_size)
    assert r.blocks_for_step(high, low, block_size) <= r.blocks_for_step(high, high, block_size)
    assert r.blocks_for_step(low, low, block_size) <= r.blocks_for_step(high, low, block_size)
    assert r.step_budget(low, block_size) <= r.step_budget(high, block_size)
    assert r.step_budget(high, block_size, low) <= r.step_budget(high, block_size, high)


@given(retentions, st.integers(1, 400), blocks, st.data())
def test_one_request_stays_within_resident_and_budget(
    r: Retention, tokens: int, block_size: int, data: st.DataObject
) -> None:
    scheduled = data.draw(st.integers(1, tokens))
    promised = r.resident_blocks(tokens, block_size) + r.step_budget(scheduled, block_size)
    assert r.blocks_for_step(tokens, scheduled, block_size) <= promised


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to share at most `total` scheduled tokens among `parts` requests, zeros included."""
    return [s for s in combinations_with_replacement(range(total + 1), parts) if sum(s) <= total]


@pytest.mark.parametrize("make", [Window, Chunk])
def test_one_budget_serves_all_requests_of_a_step_and_none_smaller_would(make: Callable[[int], Retention]) -> None:
    """Every request sits at its worst offset at once: same length, same step, as a batch of twins does."""
    long = 10_000  # far beyond every cap by the request's own length
    for size in range(1, 12):
        for block_size in (1, 2, 3, 4, 8):
            r = make(size)
            resident = r.resident_blocks(long, block_size)
            for total in (1, 2, 3, 7, 12):
                for requests in (1, 2, 3):
                    worst = max(
                        sum(r.blocks_for_step(long, s, block_size) - resident for s in split if s)
                        for split in splits(total, requests)
                    )
                    assert r.step_budget(total, block_size, requests) == worst


def test_decodes_of_many_requests_each_count_a_block() -> None:
    """256 twins with a window of 18 over blocks of 16 all need a third block in the same step."""
    r = Window(18)
    assert (r.resident_blocks(1000, 16), r.blocks_for_step(1000, 1, 16)) == (2, 3)
    assert len(held_in_step(r, 33, 1, 16)) == 3  # tokens 15 .. 32
    assert r.step_budget(256, 16, 256) == 256


def test_a_sequence_of_twenty_windows_keeps_only_the_bound() -> None:
    r, block_size = Window(64), 16
    held = [len(held_between(r, n, block_size)) for n in range(1, 20 * 64)]
    assert max(held) == r.resident_blocks(20 * 64, block_size) == 5


@given(st.integers(1, 500), blocks, st.integers(0, 50), st.integers(1, 50))
def test_encoder_and_state_do_not_grow_with_the_text(most: int, p: int, tokens: int, scheduled: int) -> None:
    encoder, states = Encoder(most), Latest(3)
    begun = tokens > 0
    assert encoder.resident_blocks(tokens, p) == (len({i // p for i in range(most)}) if begun else 0)
    assert encoder.blocks_for_step(tokens, scheduled, p) == encoder.resident_blocks(tokens, p)
    assert states.resident_blocks(tokens, p) == (3 if begun else 0)
    assert states.blocks_for_step(tokens, scheduled, p) == states.resident_blocks(tokens, p)
    assert encoder.step_budget(scheduled, p) == states.step_budget(scheduled, p) == 0


def test_48_tokens_take_3_blocks() -> None:
    assert Full().resident_blocks(48, 16) == 3
    assert Full().resident_blocks(49, 16) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(0),
        lambda: Window(-4),
        lambda: Window(4, keep_first=-1),
        lambda: Chunk(0),
        lambda: Latest(0),
        lambda: Encoder(0),
        lambda: Window(True),
        lambda: Window(2.5),  # type: ignore[arg-type]
    ],
)
def test_absurd_sizes_are_refused(make: Callable[[], Retention]) -> None:
    with pytest.raises(SpecError) as info:
        make()
    assert info.value.field
    assert info.value.allowed
