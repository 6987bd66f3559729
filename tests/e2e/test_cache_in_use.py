"""The cache while a model runs on it: bounds of windows, bound tensors, forks, and no stray allocation."""

from __future__ import annotations

import pytest
import torch
from models.tiny import tiny_model
from support import canary
from support.engines import make_llm
from support.reference import full_logits

from kvcore.engine.settings import SamplingParams
from kvcore.errors import RequestError
from kvcore.memory.arena import Arena
from kvcore.spec.retention import Window

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    return tiny_model("mistral_window", tmp_path_factory.getbasetemp())


def add(llm, name, prompt, count, **keys):
    keys.setdefault("ignore_eos", True)
    return llm.core.add_request(name, prompt, SamplingParams(max_tokens=count, **keys))


def test_window_layers_keep_a_bounded_number_of_blocks(mistral):
    """A sequence grows to 20 windows of 16 tokens; what it gives up serves others in the same run."""
    window, length = 16, 320
    llm = make_llm(mistral, max_model_len=400, num_blocks=24, max_num_batched_tokens=32, max_num_seqs=4)
    group = llm.plan.configs[0].kv_cache_groups[0]
    assert group.spec.retention == Window(window)
    torch.manual_seed(1)
    prompt = torch.randint(1, 250, (30,)).tolist()
    long = add(llm, "long", prompt, length - len(prompt))
    others, seen, i = [], set(), 0
    while long.finish_reason is None:
        if len(llm.core.scheduler.requests) < 3:
            others.append(add(llm, f"other{i}", [1 + i % 200] * 40, 8))
            i += 1
        llm.core.step()
        if long.finish_reason is None and (computed := int(llm.core.manager.requests.computed[long.row])):
            _, ids = llm.core.manager.table(long.row, 0)
            assert len(ids) <= group.spec.retention.resident_blocks(computed, group.block_size)
            seen |= set(ids)
    llm.core.manager.check_integrity()
    # More ids than the arena has at once could never have been used without handing them on.
    assert len(long.tokens) == length
    assert len(seen) > 10
    assert sum(len(o.tokens) for o in others if o.finish_reason) > 24 * 16
    logits = full_logits(mistral, [long.tokens])[0]
    gaps = logits.topk(2).values
    for position in range(len(prompt) - 1, length - 1):
        best = int(logits[position].argmax())
        near_tie = float(gaps[position, 0] - gaps[position, 1]) <= TOLERANCE
        assert best == long.tokens[position + 1] or near_tie


def test_bound_tensors_never_move_and_no_step_allocates_cache_memory(llama, monkeypatch):
    llm = make_llm(llama, max_model_len=512, num_blocks=80, max_num_seqs=4)
    runner = llm.core.executor.worker.runner
    arena, layers = runner.cache.memory.arena, runner.cache.attention.layers
    made = []
    original = Arena.__init__
    monkeypatch.setattr(Arena, "__init__", lambda self, *a, **k: (made.append(a), original(self, *a, **k))[1])

    def addresses():
        first = [{n: t.data_ptr() for n, t in fields.items()} for fields in runner.kv_caches]
        bound = [layers[c] for c in sorted(layers)]
        second = [{n: t.data_ptr() for n, t in layer.cache.items()} for layer in bound]
        assert first == second
        return first

    before, start = addresses(), arena.address
    for fields in runner.kv_caches:
        for tensor in fields.values():
            assert canary.lies_in(arena, tensor)
            assert tensor.untyped_storage().data_ptr() <= start
    for step in range(1000):
        if len(llm.core.scheduler.requests) < 3:
            add(llm, f"r{step}", [1 + step % 200] * 20, 60)
        assert llm.core.step()
    assert addresses() == before
    assert arena.address == start
    assert made == []


def test_samples_equal_separate_runs_with_the_same_seeds(llama):
    prompt, count, keys = list(range(1, 22)), 12, {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    llm = make_llm(llama, num_blocks=200, max_num_seqs=8)
    add(llm, "many", prompt, count, n=4, seed=5, **keys)
    family = {}
    while llm.core.has_unfinished:
        for new in llm.core.step():
            family[new.request.sample] = new.request
    assert llm.stats()["copied_blocks"] == 3
    texts = [family[i].output_ids for i in range(4)]
    assert len({tuple(t) for t in texts}) > 1
    for i in range(4):
        single = make_llm(llama, num_blocks=200, max_num_seqs=8)
        alone = add(single, "one", prompt, count, seed=5 + i, **keys)
        while single.core.has_unfinished:
            single.core.step()
        assert alone.output_ids == texts[i]


def test_abort_in_the_middle_leaves_the_others_alone(llama):
    def run(abort_after: int | None):
        llm = make_llm(llama, num_blocks=200, max_num_seqs=4, max_num_batched_tokens=24)
        kept, gone = add(llm, "kept", list(range(1, 30)), 12), add(llm, "gone", list(range(5, 60)), 12)
        step = 0
        while llm.core.has_unfinished:
            if step == abort_after:
                llm.core.abort("gone")
            llm.core.step()
            step += 1
        llm.core.manager.check_integrity()
        assert llm.core.manager.stats()["blocks_used"] == 0
        return kept, gone

    want, _ = run(None)
    for step in (0, 1, 3, 8):
        kept, gone = run(step)
        assert kept.output_ids == want.output_ids
        assert gone.finish_reason == "abort"


def test_eos_and_stop_are_honoured(llama):
    llm = make_llm(llama, num_blocks=50)
    free = add(llm, "free", [3, 4, 5], 10)
    while llm.core.has_unfinished:
        llm.core.step()
    llm.core.scheduler.eos_token_ids = frozenset([free.output_ids[4]])
    ended = add(llm, "ended", [3, 4, 5], 10, ignore_eos=False)
    while llm.core.has_unfinished:
        llm.core.step()
    assert ended.finish_reason == "stop"
    first = free.output_ids.index(free.output_ids[4])
    assert ended.output_ids == free.output_ids[: first + 1]


@pytest.mark.parametrize("when", [0, 1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_engine_serves_on_after_a_step_that_failed(llama, when, error):
    """The step's requests end, nothing of it can be hit, no block is lost, and the others go on."""
    prompts = {"a": list(range(1, 50)), "b": list(range(60, 100))}
    want = {}
    for name, prompt in prompts.items():
        llm = make_llm(llama, num_blocks=40)
        want[name] = add(llm, name, prompt, 6)
        while llm.core.has_unfinished:
            llm.core.step()
    llm = make_llm(llama, num_blocks=40, max_num_batched_tokens=16, max_num_seqs=1)
    first, second = (add(llm, name, prompt, 6) for name, prompt in prompts.items())
    execute = llm.core.executor.execute

    def fails(output):
        execute(output) if when == 4 else None
        raise error

    for _ in range(when):
        llm.core.step()
    llm.core.executor.execute = fails
    with pytest.raises(error):
        llm.core.step()
    llm.core.executor.execute = execute
    assert first.finish_reason == "abort"
    again = add(llm, "again", prompts["a"], 6)
    while llm.core.has_unfinished:
        llm.core.step()
        llm.core.manager.check_integrity()
    assert second.output_ids == want["b"].output_ids
    assert again.output_ids == want["a"].output_ids
    stats = llm.core.manager.stats()
    assert (stats["blocks_used"], stats["blocks_pending"]) == (0, 0)


def test_a_refused_score_leaves_nothing_behind(llama):
    llm = make_llm(llama, num_blocks=50)
    with pytest.raises(RequestError):
        llm.score([[1, 2, 3], []])
    assert not llm.core.has_unfinished
    assert llm.score([[1, 2, 3]])[0].shape == (3, 256)


def test_one_stream_at_a_time(llama):
    llm = make_llm(llama, num_blocks=50)
    add(llm, "open", [1, 2, 3], 4)
    for ask in (lambda: llm.score([[1, 2]]), lambda: llm.generate(["text"])):
        with pytest.raises(RequestError, match="still answering"):
            ask()
    llm.core.abort("open")
    assert len(llm.score([[1, 2]])) == 1


@pytest.mark.parametrize("prompts", ["one text", [5], [None], ["fine", "half \udcff"]])
def test_prompts_that_are_no_list_of_texts_are_refused(llama, prompts):
    with pytest.raises(RequestError) as caught:
        make_llm(llama, num_blocks=50).generate(prompts)
    assert caught.value.field == "prompts"
