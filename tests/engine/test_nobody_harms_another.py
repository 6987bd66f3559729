"""Requests that fail, raise, are aborted or are named strangely: the others get the right text all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import tiny_model
from support.serving import BAD, PHASES, PROBE, Ids, answer, drain, engine, failing, nothing_leaks

from kvcore.cli import main
from kvcore.engine.llm import LLM
from kvcore.engine.settings import SamplingParams
from kvcore.errors import CapacityError, NotFiniteError, RequestError
from kvcore.manage.step import Step
from kvcore.worker.messages import SampleAsk
from kvcore.worker.sampler import Sampler


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.getbasetemp())


@pytest.fixture
def llm(path: Path) -> LLM:
    return engine(path)


# ---- numbers that are not finite


def test_a_request_that_is_not_finite_ends_with_its_reason_and_the_others_go_on(path: Path, llm: LLM) -> None:
    want = answer(engine(path))
    bad = llm.core.add_request("bad", [5, 9, BAD, 4], SamplingParams(max_tokens=4))
    assert answer(llm) == want
    assert (bad.finish_reason, bad.output_ids) == ("error", [])
    assert isinstance(bad.error, NotFiniteError)
    assert "layer 0, queries of head 0" in str(bad.error)
    nothing_leaks(llm)


def test_all_samples_of_a_prompt_end_with_it(llm: LLM) -> None:
    llm._tokenizer = Ids()  # type: ignore[assignment]
    outputs = llm.generate([f"5 {BAD}", "5 6"], SamplingParams(max_tokens=3, n=3, temperature=1.0, ignore_eos=True))
    assert [o.finish_reason for o in outputs] == ["error"] * 3 + ["length"] * 3
    assert [type(o.error) for o in outputs] == [NotFiniteError] * 3 + [type(None)] * 3
    assert [len(o.token_ids) for o in outputs] == [0, 0, 0, 3, 3, 3]
    nothing_leaks(llm)


@pytest.mark.parametrize("chunks", [False, True])
def test_what_it_computed_is_never_hit(path: Path, chunks: bool) -> None:
    """Blocks of earlier chunks were committed before any logits were looked at."""
    llm = engine(path, max_num_batched_tokens=16 if chunks else 64)
    prompt = [3, BAD, *range(1, 39)]
    for _ in range(2):
        request = llm.core.add_request("bad", prompt, SamplingParams(max_tokens=2))
        drain(llm)
        assert request.finish_reason == "error"
        assert request.num_cached_tokens == 0
    assert llm.core.manager.stats()["blocks_cached"] == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["lm_head", "norm"])
def test_every_kind_of_number_and_place_is_seen(path: Path, value: float, where: str) -> None:
    llm = engine(path)
    module = llm.core.executor.worker.model.module
    with torch.no_grad():
        if where == "lm_head":
            module.lm_head.weight.fill_(abs(value) if value != float("-inf") else value)
        else:
            module.model.layers[1].input_layernorm.weight[0] = value
    request = llm.core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0.5))
    drain(llm)
    assert isinstance(request.error, NotFiniteError)
    assert ("layer 1" in str(request.error)) == (where == "norm")


def test_a_masked_vocabulary_is_legal() -> None:
    logits = torch.full((1, 9), float("-inf"))
    logits[0, 4] = -3.0
    asks = [[SampleAsk(0.0, 1.0, 0, 0, 0), SampleAsk(0.8, 1.0, 0, 1, 0), SampleAsk(0.8, 0.5, 5, 1, 0)]]
    assert Sampler()(logits, asks) == ((4, 4, 4),)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_sampler_draws_nothing_from_such_numbers(value: float) -> None:
    with pytest.raises(NotFiniteError, match="rows \\[1\\]"):
        Sampler()(torch.tensor([[1.0, 2.0], [value, value]]), [[SampleAsk(0.0, 1.0, 0, 0, 0)]] * 2)


def test_scoring_says_it(llm: LLM) -> None:
    with pytest.raises(NotFiniteError):
        llm.score([[1, 2, 3], [1, BAD, 3]])
    nothing_leaks(llm)
    assert len(llm.score([[1, 2, 3]])[0]) == 3


def test_run_ends_with_status_1(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from models.test_gguf import gguf_state, write_gguf
    from models.tiny import reference_model
    from safetensors.torch import load_file, save_file

    from kvcore.models.gguf import convert

    convert(write_gguf(tmp_path / "m.gguf", gguf_state(reference_model(path))), tmp_path / "m", lambda *_: None)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    weights["model.embed_tokens.weight"][94] = float("nan")  # the token "~"
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    words = ["run", f"model.path={tmp_path / 'm'}", "device=cpu", "cache.num_blocks=99", "sampling.max_tokens=3"]
    status = main([*words, "output=json", "--prompt", "abc", "--prompt", "a~c"])
    good, bad = json.loads(capsys.readouterr().out)["outputs"]
    assert (status, good["finish_reason"], good["error"]) == (1, "length", None)
    assert (bad["finish_reason"], bad["token_ids"], bad["error"]["type"]) == ("error", [], "NotFiniteError")
    assert main([*words, "--prompt", "a~c"]) == 1
    assert "NotFiniteError: the logits" in capsys.readouterr().out


# ---- names


def test_no_sample_is_taken_for_a_request(llm: LLM) -> None:
    ids = {"a#1": [1, 2, 3], "a": [4, 5, 6], "other": [7, 8, 9], "1:a": [2, 2], "": [3, 3]}
    requests = [
        llm.core.add_request(name, prompt, SamplingParams(max_tokens=4, n=2 if name == "a" else 1, ignore_eos=True))
        for name, prompt in ids.items()
    ]
    tokens: dict[tuple[str, int], int] = {}
    while llm.core.has_unfinished:
        for new in llm.core.step():
            key = (new.request.request_id, new.request.sample)
            tokens[key] = tokens.get(key, 0) + 1
    assert tokens == {(name, sample): 4 for name in ids for sample in range(2 if name == "a" else 1)}
    assert all(r.finish_reason == "length" for r in requests)
    nothing_leaks(llm)


def test_names_that_a_stream_makes_never_meet_a_callers(llm: LLM) -> None:
    llm._tokenizer = Ids()  # type: ignore[assignment]
    outputs, mine = [], []
    for event in llm.stream(["5 6", "7"], SamplingParams(max_tokens=4, ignore_eos=True)):
        if not mine:
            sampling = SamplingParams(max_tokens=9, ignore_eos=True)
            mine = [llm.core.add_request(f"r{i}", [1, 2], sampling) for i in range(4)]
        outputs += [event.output] if event.output else []
    assert [(o.prompt, len(o.token_ids)) for o in outputs] == [("5 6", 4), ("7", 4)]
    assert [(r.finish_reason, r.num_outputs) for r in mine] == [("length", 9)] * 4
    assert not llm.core._reserved
    nothing_leaks(llm)


@pytest.mark.parametrize("name", [7, None, b"a", "\0001\0a"])
def test_names_that_are_refused(llm: LLM, name: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.core.add_request(name, [1], SamplingParams())
    assert caught.value.field == "request_id"
    assert not llm.core.has_unfinished


def test_a_name_is_in_use_until_its_last_sample_ends(llm: LLM) -> None:
    first = llm.core.add_request("x", [1, 2], SamplingParams(max_tokens=9, n=2, temperature=1.0, ignore_eos=True))
    llm.core.step()
    llm.core.end(first, "stop")
    with pytest.raises(RequestError, match="being served"):
        llm.core.add_request("x", [1], SamplingParams())
    drain(llm)
    answer(llm, "x")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_ends_all_samples(llm: LLM, steps: int) -> None:
    sampling = SamplingParams(max_tokens=30, n=4, temperature=1.0, ignore_eos=True)
    llm.core.add_request("x", [1, 2, 3], sampling)
    for _ in range(steps):
        llm.core.step()
    llm.core.abort("x")
    assert sorted(llm.core.scheduler.requests) == []
    llm.core.step()
    nothing_leaks(llm)


def test_tokens_that_are_no_ids_are_refused_and_leave_nothing(llm: LLM) -> None:
    for prompt in ([1.5], ["a"], [True], [None], [-1], [256], [1 << 40]):
        with pytest.raises(RequestError):
            llm.core.add_request("x", prompt, SamplingParams())
    nothing_leaks(llm)


# ---- an exception in any phase


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_any_phase_leaves_the_engine_serving(
    path: Path, llm: LLM, phase: str, error: BaseException
) -> None:
    want = answer(engine(path))
    llm.core.add_request("a", [*PROBE, 2], SamplingParams(max_tokens=20, n=2, temperature=1.0, ignore_eos=True))
    llm.core.add_request("b", PROBE[:3], SamplingParams(), forced=PROBE[3:6], keep_logits=True)
    with pytest.MonkeyPatch.context() as patch:
        failing(llm, patch, phase, error)
        with pytest.raises(type(error)):
            drain(llm)
    # Whoever was in the failed step has ended; if it was only waiting it may still run.
    drain(llm)
    assert answer(llm) == want
    llm.core.step()
    nothing_leaks(llm)


def test_an_eviction_policy_that_raises_loses_no_block(llm: LLM) -> None:
    for i in range(20):
        answer(llm, f"r{i}", [i + 1] * 60, 1)
    with pytest.MonkeyPatch.context() as patch:
        failing(llm, patch, "evict", RuntimeError("no"))
        llm.core.add_request("a", list(range(1, 61)), SamplingParams(max_tokens=3))
        with pytest.raises(RuntimeError):
            drain(llm)
    drain(llm)
    llm.core.step()
    nothing_leaks(llm)


def test_a_request_that_can_never_go_on_ends_and_the_others_are_served(llm: LLM) -> None:
    """The plan admits only what fits; were it wrong, one request would pay for it, not all."""
    request = llm.core.add_request("a", PROBE, SamplingParams(max_tokens=30, ignore_eos=True))
    llm.core.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "short", property(lambda step: 1))
        (ended,) = llm.core.step()
    assert (ended.request, ended.token) == (request, None)
    assert isinstance(request.error, CapacityError)
    answer(llm)


# ---- limits


@pytest.mark.parametrize("lens", [None, [32], [1], [64]])
def test_a_text_that_fills_the_model_can_be_scored(path: Path, llm: LLM, lens: list[int] | None) -> None:
    ids = [i * 7 % 250 + 1 if i * 7 % 250 + 1 != BAD else 1 for i in range(64)]
    (logits,) = llm.score([ids], prompt_lens=lens)
    assert logits.shape == (64, 256)
    (shorter,) = llm.score([ids[:40]])
    assert torch.allclose(logits[:40], shorter, atol=1e-4)
    nothing_leaks(llm)


@pytest.mark.parametrize(
    ("texts", "lens", "field"),
    [
        ([[1], [1] * 65], None, "prompt"),
        ([[1], []], None, "prompt"),
        ([[1, 2]], [0], "prompt_lens"),
        ([[1, 2]], [3], "prompt_lens"),
        ([[1, 2]], [1, 1], "prompt_lens"),
        ([[1, 2]], [], "prompt_lens"),
        ([[1, 2]], [True], "prompt_lens"),
        ([[1], [1, 999]], [1, 1], "prompt"),
    ],
)
def test_what_can_never_be_scored_is_refused_before_any_work(
    llm: LLM, texts: list[list[int]], lens: list[int] | None, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.score(texts, prompt_lens=lens)
    assert caught.value.field == field
    assert llm.core.manager.stats()["steps"] == 0
    nothing_leaks(llm)


@pytest.mark.parametrize(("length", "served"), [(63, True), (64, False)])
def test_generation_needs_room_for_one_token(llm: LLM, length: int, served: bool) -> None:
    if served:
        assert len(answer(llm, prompt=[1] * length)) == 1
        return
    with pytest.raises(RequestError, match="no room"):
        llm.core.add_request("a", [1] * length, SamplingParams())
