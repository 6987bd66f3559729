"""Penalties, filters, early ends and log-probabilities: against transformers' generate and arithmetic by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.tiny import reference_model, tiny_model
from support.engines import make_llm

from kvcore.engine.llm import LLM
from kvcore.engine.request import Request
from kvcore.engine.sampling import SamplingParams
from kvcore.errors import RequestError
from kvcore.worker.messages import SampleAsk, SchedulerOutput
from kvcore.worker.sampler import Sampler, adjusted, filtered_probabilities

LIMITS = {"num_blocks": 40, "max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4}
PROMPT = [5, 9, 200, 31, 7, 7, 12]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return make_llm(path, **LIMITS)


def ask(llm: LLM, prompt: list[int] = PROMPT, **sampling: Any) -> Request:
    keys = {"ignore_eos": True, "max_tokens": 24} | sampling
    request = llm.core.add_request("x", prompt, SamplingParams(**keys))
    while llm.core.has_unfinished:
        llm.core.step()
    return request


def generate(path: Path, **keys: Any) -> list[int]:
    model = reference_model(path)
    out = model.generate(
        torch.tensor([PROMPT]), do_sample=False, attention_mask=torch.ones(1, len(PROMPT)), pad_token_id=0, **keys
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(path: Path, llm: LLM, penalty: float) -> None:
    want = generate(path, repetition_penalty=penalty, max_new_tokens=24, eos_token_id=None)
    assert ask(llm, repetition_penalty=penalty).output_ids == want
    assert want != ask(llm).output_ids


def test_min_tokens_is_that_of_transformers(path: Path, llm: LLM) -> None:
    greedy = ask(llm).output_ids
    end = greedy[3]
    want = generate(path, min_new_tokens=10, max_new_tokens=24, eos_token_id=[end])
    got = ask(llm, stop_token_ids=(end,), min_tokens=10)
    assert got.output_ids == want
    early = ask(llm, stop_token_ids=(end,))
    assert (early.output_ids, early.finish_reason) == (greedy[: greedy.index(end) + 1], "stop")


def test_ends_that_the_model_cannot_draw_harm_nobody() -> None:
    row = SampleAsk(0.0, 1.0, 0, 0, 0, banned=(0, 4, 70_000))
    assert Sampler()(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), [[row]]) == ((1,),)


def test_presence_and_frequency_by_hand() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0])
    row = SampleAsk(0.0, 1.0, 0, 0, 3, presence=0.5, frequency=0.25, prompt=(3, 3), output=(0, 1, 0))
    # 4 - 0.5 - 2 * 0.25, 3 - 0.5 - 0.25, and what only the prompt has stays
    assert adjusted(logits, row).tolist() == [3.0, 2.25, 2.0, 1.0]
    assert Sampler()(logits[None], [[row._replace(presence=2.0, frequency=2.0)]]) == ((2,),)


def test_penalties_reach_the_sampler(llm: LLM) -> None:
    plain = ask(llm, [3] * 8, max_tokens=40).output_ids
    held = ask(llm, [3] * 8, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0).output_ids
    assert len(set(held)) > len(set(plain))


@given(
    st.lists(st.integers(-900, 900).map(lambda v: v / 100), min_size=2, max_size=30, unique=True),
    st.floats(0.2, 2),
    st.integers(0, 8),
    st.floats(0.2, 1),
    st.floats(0, 0.6),
)
def test_filters_keep_what_transformers_keeps(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor(values, dtype=torch.float64)
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits[None].clone()
    for warper in warpers:
        scores = warper(None, scores)
    want = torch.softmax(scores[0], -1)
    ids, got = filtered_probabilities(logits, SampleAsk(temperature, top_p, top_k, 0, 0, min_p))
    mass = torch.softmax(logits / temperature, -1).sort(descending=True)[0].cumsum(-1)
    if float((mass - top_p).abs().min()) > 1e-6:  # a mass within rounding of top_p may fall on either side
        assert sorted(ids.tolist()) == want.nonzero().flatten().tolist()
        assert torch.allclose(want[ids], got, atol=1e-9)


def test_logprobs_are_those_of_the_models_own_logits(llm: LLM) -> None:
    request = ask(llm, max_tokens=5, logprobs=3, temperature=0.9, top_k=2, repetition_penalty=1.5)
    assert len(request.logprobs) == 5
    (logits,) = llm.score([[*PROMPT, *request.output_ids]])
    for i, (token, told) in enumerate(zip(request.output_ids, request.logprobs, strict=True)):
        want = torch.log_softmax(logits[len(PROMPT) - 1 + i].double(), -1)
        (chosen, value), *likeliest = told
        assert chosen == token
        assert value == pytest.approx(float(want[token]), abs=1e-4)
        assert [v for _, v in likeliest] == pytest.approx(want.topk(3).values.tolist(), abs=1e-4)
    assert ask(llm, max_tokens=2).logprobs == []
    assert [len(told) for told in ask(llm, max_tokens=2, logprobs=0).logprobs] == [1, 1]


def test_each_sample_has_its_own(llm: LLM) -> None:
    found: dict[int, list[Any]] = {}
    sampling = SamplingParams(max_tokens=4, n=3, temperature=1.0, logprobs=1, presence_penalty=1.0, ignore_eos=True)
    llm.core.add_request("x", PROMPT, sampling)
    while llm.core.has_unfinished:
        for new in llm.core.step():
            found[new.request.sample] = [new.request.output_ids, [told[0][0] for told in new.request.logprobs]]
    assert sorted(found) == [0, 1, 2]
    assert all(ids == told for ids, told in found.values())


def test_preemption_changes_no_draw(path: Path) -> None:
    keys = {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_p": 0.01, "seed": 5}
    outputs = []
    for blocks in (40, 6):
        llm = make_llm(path, **(LIMITS | {"num_blocks": blocks}))
        requests = [
            llm.core.add_request(f"r{i}", [i + 1] * 10, SamplingParams(max_tokens=30, ignore_eos=True, **keys))
            for i in range(3)
        ]
        while llm.core.has_unfinished:
            llm.core.step()
        outputs.append([r.output_ids for r in requests])
        assert (llm.core.scheduler.stats.preemptions > 0) == (blocks == 6)
    assert outputs[0] == outputs[1]


PENALIZED = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5}


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch, fail_at: int = 0) -> list[SchedulerOutput]:
    """The steps that are sent from now on; the worker of one of them fails after it has run."""
    sent: list[SchedulerOutput] = []
    execute = llm.core.executor.execute

    def recorded(output: SchedulerOutput) -> Any:
        sent.append(output)
        result = execute(SchedulerOutput.from_bytes(output.to_bytes()))
        if len(sent) == fail_at:
            raise RuntimeError("on purpose")
        return result

    monkeypatch.setattr(llm.core.executor, "execute", recorded)
    return sent


def test_tokens_that_penalties_count_are_sent_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = watch(llm, monkeypatch)
    ask(llm, PROMPT * 4, **PENALIZED, max_tokens=30)
    assert [[bool(e.ask.prompt) for e in output.entries] for output in sent] == [[True]] + [[]] * 29
    assert max(len(output.to_bytes()) for output in sent[2:]) < 200
    ask(llm)
    texts = llm.core.executor.worker.runner.texts._texts.values()
    assert [text.tokens for text in texts] == [[]]  # the first request's went with it


def test_samples_of_one_prompt_are_penalized_like_requests_of_their_own(llm: LLM) -> None:
    want = [ask(llm, **PENALIZED, seed=seed).output_ids for seed in (5, 6, 7)]
    found: dict[int, list[int]] = {}
    llm.core.add_request("x", PROMPT, SamplingParams(**PENALIZED, n=3, seed=5, max_tokens=24, ignore_eos=True))
    while llm.core.has_unfinished:
        for new in llm.core.step():
            found[new.request.sample] = new.request.output_ids
    assert [found[i] for i in range(3)] == want


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_step_that_failed_leaves_no_tokens_to_count(llm: LLM, monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
    want = ask(llm, **PENALIZED).output_ids
    with monkeypatch.context() as patch:
        watch(llm, patch, fail_at)
        with pytest.raises(RuntimeError, match="on purpose"):
            ask(llm, PROMPT[::-1], **PENALIZED)
    assert ask(llm, **PENALIZED).output_ids == want  # of the same name


def test_a_request_that_leaves_itself_no_token_ends_alone(llm: LLM) -> None:
    every = tuple(range(256))
    bad = llm.core.add_request("bad", PROMPT, SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=every))
    good = llm.core.add_request("good", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    while llm.core.has_unfinished:
        llm.core.step()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "minus infinity" in str(bad.error)
    assert bad.error.field == "sampling.min_tokens"


def test_asks_survive_the_wire(llm: LLM) -> None:
    sampling = SamplingParams(
        max_tokens=9, min_tokens=4, min_p=0.1, repetition_penalty=1.5, stop_token_ids=(7, 8), logprobs=2, n=2
    )
    request = llm.core.add_request("x", PROMPT, sampling)
    output = llm.core.scheduler.schedule()
    assert output is not None
    back = SchedulerOutput.from_bytes(output.to_bytes())
    assert back.to_bytes() == output.to_bytes()
    (entry,) = back.entries
    assert entry.ask == request.sample_ask()
    assert (entry.ask.prompt, entry.min_tokens, back.draws.tolist()) == (tuple(PROMPT), 4, [2])
    assert {7, 8} < set(entry.ask.banned)  # and the model's end of text
    llm.core.scheduler.abandon(output)


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 65}, "min_tokens"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"temperature": float("inf")}, "temperature"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop_token_ids": "7"}, "stop_token_ids"),
        ({"stop_token_ids": ("7",)}, "stop_token_ids"),
        ({"stop": (7,)}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**5000}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_bad_values_are_refused_where_they_are_made(keys: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**keys)
    assert caught.value.field == f"sampling.{field}"
    assert field in str(caught.value)


def test_stop_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        ask(llm, stop_token_ids=(999,))
    assert caught.value.field == "sampling.stop_token_ids"
