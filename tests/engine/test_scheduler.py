"""The scheduler with the real manager over a worker made of arithmetic: every text must be right.

Expected texts come from an oracle without any cache (`support.fake_worker.oracle`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_worker import FakeWorker, oracle

import kvcore
from kvcore.engine.request import Request, check_request
from kvcore.engine.scheduler import Scheduler
from kvcore.engine.settings import SamplingParams
from kvcore.errors import RequestError
from kvcore.manage.manager import KVCacheManager
from kvcore.manage.step import Step
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.retention import Chunk, Full, Retention, Window

LENGTH = 64


class Bench:
    """Manager, scheduler and fake worker around one plan."""

    def __init__(
        self,
        retentions: list[Retention],
        *,
        tokens: int = 16,
        seqs: int = 4,
        blocks: int | None = None,
        size: int = 4,
        heads: list[int] | None = None,
        spare: int = 0,
        partial: bool = False,
    ) -> None:
        heads = heads or []  # packed, with so many KV heads a group
        shapes = zip(retentions, heads or [1] * len(retentions), strict=True)
        specs = {CacheId(i): KVCacheSpec(KVHeads(h, 8), r) for i, (r, h) in enumerate(shapes)}
        limits = Limits(LENGTH, tokens, seqs)
        roomy = kvcore.plan(specs, {}, Budget(num_blocks=2), limits, block_size=size)
        least = roomy.capacity.needed_units(LENGTH) + 1
        if heads:
            tight = kvcore.plan(specs, {}, Budget(memory=1), limits, block_size=size, placement="packed")
            room = tight.needed_bytes + spare * tight.configs[0].large_page_bytes
            plan = kvcore.plan(specs, {}, Budget(memory=room), limits, block_size=size, placement="packed")
        else:
            budget = Budget(num_blocks=least if blocks is None else blocks)
            plan = kvcore.plan(specs, {}, budget, limits, block_size=size)
        plan.require_fit()
        self.config = plan.configs[0]
        self.retentions = [g.spec.retention for g in self.config.kv_cache_groups]
        self.manager = KVCacheManager(self.config, track_dead=True, partial_reuse=partial)
        self.worker = FakeWorker(self.config)
        self.scheduler = Scheduler(
            self.manager, max_model_len=LENGTH, max_num_seqs=seqs, max_num_batched_tokens=tokens, hit_unit=size
        )
        self.arrivals = 0
        self.requests: list[Request] = []

    def add(self, prompt: list[int], count: int, **keys: Any) -> Request:
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, **keys)
        request = Request(f"q{self.arrivals}", tuple(prompt), sampling, self.arrivals, unforked=sampling.n - 1)
        self.arrivals += sampling.n
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        output = self.scheduler.schedule()
        if output is None:
            return []
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        decode = ((output.counts == 1) & (output.computed > 0)).tolist()
        assert decode == sorted(decode, reverse=True)
        produced = self.scheduler.update(output, self.worker.execute(output))
        self.manager.check_integrity()
        for request, _ in produced:
            if request not in self.requests:
                self.requests.append(request)
        return produced

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished
        assert self.manager.stats()["blocks_used"] == 0

    def check(self) -> None:
        for request in self.requests:
            count = len(request.output_ids)
            seed = request.sampling.seed + request.sample
            assert request.output_ids == oracle(self.retentions, request.prompt_ids, count, seed)
            if request.finish_reason != "abort":
                assert count == min(request.sampling.max_tokens, LENGTH - len(request.prompt_ids))


retentions = st.lists(
    st.one_of(st.just(Full()), st.integers(1, 12).map(Window), st.integers(1, 12).map(Chunk)),
    min_size=1,
    max_size=3,
    unique_by=repr,
)
prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 3), st.integers(1, 3), st.integers(1, 14)),
    min_size=1,
    max_size=6,
)


def serve(bench, asks, data):
    """Prompts that come, and now and then are aborted, between steps; every text is checked."""
    for start, length, tail, n, count in asks:
        # Common beginnings, so that prefixes are hit; unlike tails.
        bench.add([start + 3 * (i % 5) for i in range(length)] + [tail] * (tail > 0), count, n=n, seed=tail)
        for _ in range(data.draw(st.integers(0, 3))):
            bench.step()
        if bench.scheduler.requests and data.draw(st.integers(0, 5)) == 0:
            bench.scheduler.finish(data.draw(st.sampled_from(sorted(bench.scheduler.requests))), "abort")
    bench.run()
    bench.check()


@settings(max_examples=150)
@given(retentions, prompts, st.integers(1, 24), st.integers(3, 6), st.integers(0, 30), st.data())
def test_every_text_is_right(kinds, asks, tokens, seqs, spare, data):
    bench = Bench(kinds, tokens=tokens, seqs=seqs)
    partial = data.draw(st.booleans())
    bench = Bench(kinds, tokens=tokens, seqs=seqs, blocks=bench.config.num_blocks + spare, partial=partial)
    serve(bench, asks, data)


@settings(max_examples=150)
@given(retentions, prompts, st.integers(1, 24), st.integers(3, 6), st.integers(0, 8), st.data())
def test_every_text_is_right_out_of_large_pages(kinds, asks, tokens, seqs, spare, data):
    """Down to the smallest arena of the plan: whoever fits alone is served, however scattered the pages have become."""
    heads = data.draw(st.lists(st.integers(1, 9), min_size=len(kinds), max_size=len(kinds)))
    bench = Bench(kinds, tokens=tokens, seqs=seqs, heads=heads, spare=spare, partial=data.draw(st.booleans()))
    serve(bench, asks, data)


def test_blocks_of_who_is_left_out_of_a_step_leave_its_table():
    """Ten samples of a neighbour take all tokens; what it gave up was handed out while its table named it."""
    for kinds in ([Full(), Window(1)], [Window(4)], [Chunk(4), Full()]):
        for heads in (None, [1] * len(kinds)):
            bench = Bench(kinds, tokens=10, seqs=12, heads=heads, spare=40, blocks=None if heads else 60)
            bench.add([0], 10, n=10)
            bench.add(list(range(9)), 5)
            bench.run()
            bench.check()


def test_who_fits_alone_is_served_however_scattered_the_pages():
    """Full-length requests in the least arena of their plan; without a fresh start some of them ended with an error."""
    alone = 0
    for seed in range(60):
        rng = random.Random(seed)
        kinds = [Full(), Window(rng.randint(2, 12)), Chunk(rng.randint(2, 12))][: rng.randint(2, 3)]
        bench = Bench(kinds, tokens=rng.randint(1, 24), heads=[rng.choice([1, 1, 2, 9]) for _ in kinds])
        for _ in range(rng.randint(2, 6)):
            prompt = [rng.randrange(3) + 3 * (i % 5) for i in range(rng.randint(20, 42))]
            bench.add(prompt, rng.choice([5, 44]), n=rng.choice([1, 1, 2]))
            for _ in range(rng.randrange(4)):
                bench.step()
        bench.run()
        bench.check()
        alone += bench.scheduler._alone is not None
    assert alone > 0


def test_preemption_happens_and_changes_nothing():
    bench = Bench([Full()], tokens=64, seqs=4)
    for start in range(4):
        bench.add([start] * 10, 40)
    bench.run()
    bench.check()
    assert bench.scheduler.stats.preemptions > 0


def test_samples_share_their_prompt_and_copy_on_write():
    bench = Bench([Full()], tokens=64, seqs=4, blocks=100)
    bench.add(list(range(10)), 6, n=3, seed=11)
    bench.run()
    bench.check()
    assert sorted(r.sample for r in bench.requests) == [0, 1, 2]
    # The prompt ends inside a block: all but one of the samples copy it before they write.
    assert bench.manager.stats()["copied_blocks"] == 2


def test_admission_looks_once_at_each_request():
    """Planned once each, however many run and wait: 24 decodes and 24 admissions in one step."""
    bench = Bench([Full(), Window(8)], tokens=1000, seqs=48, blocks=2000)
    for i in range(24):
        bench.add([i, *range(10)], 20)
    bench.step()
    for i in range(24, 48):
        bench.add([i, *range(10)], 20)
    looks = []
    with pytest.MonkeyPatch.context() as patch:
        add, enter = Step.add, Step._enter
        patch.setattr(Step, "add", lambda step, rows, counts: (looks.extend(rows), add(step, rows, counts))[1])
        patch.setattr(Step, "_enter", lambda step, row, *how: (looks.append(row), enter(step, row, *how))[1])
        bench.step()
    assert sorted(looks) == sorted(r.row for r in bench.requests)
    bench.run()
    bench.check()


@pytest.mark.parametrize(("running", "waits"), [(6, False), (7, True), (8, False), (11, True)])
def test_who_waits_for_a_block_waits_for_the_one_being_computed(running, waits):
    """Blocks of four: a decode computes a shared block only where its newest token fills it."""
    prompt = list(range(100, 114))
    bench = Bench([Full()], tokens=64, seqs=4, blocks=100)
    first = Request("first", tuple(prompt[:running]), SamplingParams(max_tokens=9, ignore_eos=True), -1)
    first.forced = tuple(prompt[running:])
    bench.scheduler.add(first)
    bench.step()
    bench.add(prompt, 2)
    output = bench.scheduler.schedule()
    assert (len(output.rows) == 1) == waits
    bench.scheduler.update(output, bench.worker.execute(output))
    bench.run()


def test_first_come_first_served():
    bench = Bench([Full()], tokens=8, seqs=4, blocks=100)
    for start in range(4):
        bench.add([start] * 20, 4)
    bench.run()
    ended = sorted(bench.requests, key=lambda r: r.arrival)
    assert [r.num_outputs for r in ended] == [4] * 4
    bench = Bench([Full()], tokens=8, seqs=1, blocks=100)
    order = []
    for start in range(3):
        bench.add([start] * (20 - 5 * start), 3)
    while bench.scheduler.has_unfinished:
        order += [r.request_id for r, _ in bench.step()]
    assert order == [f"q{i}" for i in range(3) for _ in range(3)]


def test_a_prefix_is_reused_and_counted():
    bench = Bench([Full()], tokens=64, seqs=4, blocks=100)
    bench.add(list(range(17)), 2)
    bench.run()
    second = bench.add(list(range(17)), 2)
    bench.run()
    bench.check()
    assert second.num_cached_tokens == 16
    assert bench.scheduler.stats.cached_tokens == 16
    assert bench.scheduler.stats.prompt_tokens == 34


def test_requests_that_arrive_together_share_their_beginning():
    """The second and third wait for the step that computes what they share; a fourth, unlike, does not."""
    bench = Bench([Full()], tokens=64, seqs=4, blocks=100)
    common = list(range(18))
    family = [bench.add([*common, tail], 3) for tail in (40, 41, 42)]
    other = bench.add([7] * 9, 3)
    first = [r.request_id for r, _ in bench.step()]
    assert sorted(first) == sorted([family[0].request_id, other.request_id])
    bench.run()
    bench.check()
    assert [r.num_cached_tokens for r in family] == [0, 16, 16]
    assert other.num_cached_tokens == 0


def test_abort_of_waiting_and_running():
    bench = Bench([Full(), Window(5)], tokens=8, seqs=1)
    first, second = bench.add([1] * 12, 10), bench.add([2] * 12, 10)
    bench.step()
    bench.scheduler.finish(second.request_id, "abort")
    bench.step()
    bench.step()
    bench.scheduler.finish(first.request_id, "abort")
    bench.scheduler.finish("nobody", "abort")
    assert bench.step() == []
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    assert bench.manager.stats()["blocks_used"] == 0
    bench.check()


@pytest.mark.parametrize(
    ("prompt", "keys", "field"),
    [
        ([], {}, "prompt"),
        ([1] * 64, {}, "prompt"),
        ([99], {}, "prompt"),
        ([1], {"max_tokens": 0}, "sampling.max_tokens"),
        ([1], {"temperature": -1.0}, "sampling.temperature"),
        ([1], {"temperature": float("nan")}, "sampling.temperature"),
        ([1], {"top_p": 0.0}, "sampling.top_p"),
        ([1], {"top_k": -1}, "sampling.top_k"),
        ([1], {"n": 0}, "sampling.n"),
        ([1], {"n": 5}, "sampling.n"),
        ([1], {"max_tokens": 2.5}, "sampling.max_tokens"),
        ([1], {"max_tokens": "8"}, "sampling.max_tokens"),
        ([1], {"temperature": "hot"}, "sampling.temperature"),
        ([1], {"top_k": True}, "sampling.top_k"),
        ([1], {"seed": None}, "sampling.seed"),
        ([1], {"ignore_eos": 1}, "sampling.ignore_eos"),
        ([1], {"stop": ("",)}, "sampling.stop"),
        ([1], {"stop": "end"}, "sampling.stop"),
    ],
)
def test_requests_that_can_never_be_served(prompt, keys, field):
    with pytest.raises(RequestError) as error:
        check_request(prompt, SamplingParams(**keys), max_model_len=64, max_num_seqs=4, vocab_size=50)
    assert error.value.field == field
