"""`kvcore run` on the default model, from the command line: the JSON promise, samples, bad input, -O."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from models.tiny import tiny_model

from kvcore.cli import main

SMALL = ("device=cpu", "cache.memory=64MiB", "engine.max_model_len=512", "output=json")
PROMPTS = ("--prompt", "What is the capital of France?", "--prompt", "Count: one, two,", "sampling.max_tokens=6")


@pytest.fixture
def call(capsys):
    def run_it(*argv):
        status = main(argv)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run_it


@pytest.fixture(scope="module")
def document(smollm2):
    """One run in a process of its own, asserts switched off by -O."""
    return {flags: json.loads(run_python(*flags)) for flags in ((), ("-O",))}


def run_python(*flags: str) -> str:
    command = [sys.executable, *flags, "-m", "kvcore", "run", *SMALL, *PROMPTS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return done.stdout


def test_the_document_has_every_promised_field(document):
    run = document[()]
    assert {"outputs", "plan", "stats", "backends"} <= set(run)
    for output in run["outputs"]:
        assert {"prompt", "text", "token_ids", "finish_reason", "num_cached_tokens"} <= set(output)
    assert {
        "prompt_tokens",
        "output_tokens",
        "seconds",
        "tokens_per_second",
        "preemptions",
        "prefix_hit_rate",
        "peak_blocks",
    } <= set(run["stats"])
    assert [o["prompt"] for o in run["outputs"]] == [PROMPTS[1], PROMPTS[3]]
    assert "Paris" in run["outputs"][0]["text"]
    assert run["backends"] == {"0 full": "torch"}
    assert run["plan"]["fits"]


def test_optimized_python_gives_the_same_tokens_and_plan(document):
    plain, optimized = document[()], document[("-O",)]
    assert plain["outputs"] == optimized["outputs"]
    assert plain["plan"] == optimized["plan"]


def test_samples_stop_strings_and_prefix_hits(smollm2, call, tmp_path):
    common = "The keeper of the lighthouse wrote in his book every evening, and on that evening he wrote that"
    file = tmp_path / "prompts.txt"
    file.write_text(f"{common} the sea\n\n{common} the wind\n", encoding="utf-8")
    status, out, _ = call(
        "run",
        *SMALL,
        f"prompts={file}",
        "sampling.n=2",
        "sampling.temperature=0.8",
        "sampling.seed=3",
        "sampling.max_tokens=5",
        "chat=false",
    )
    run = json.loads(out)
    assert status == 0
    assert [o["prompt"].endswith(w) for o, w in zip(run["outputs"], ["sea", "sea", "wind", "wind"], strict=True)]
    assert run["stats"]["copied_blocks"] >= 1
    # The second prompt arrives with the first, and waits for the step that computes what they share.
    assert [o["num_cached_tokens"] > 0 for o in run["outputs"]] == [False, False, True, True]
    status, out, _ = call("run", *SMALL, "--prompt", "What is the capital of France?", "sampling.stop=[Paris]")
    (output,) = json.loads(out)["outputs"]
    assert (status, output["finish_reason"]) == (0, "stop")
    assert output["text"].endswith("is ")


@pytest.mark.parametrize(
    ("override", "kind", "says"),
    [
        ("engine.max_model_len=16", "RequestError", "leaves no room"),
        ("engine.max_model_len=9000", "ConfigError", "8192"),
        ("model.path=no/such/folder", "ModelError", "no/such/folder"),
        ("cache.memory=1MiB", "CapacityError", "bytes are needed"),
        ("cache.block_size=0", "ConfigError", "cache.block_size"),
        ("cache.num_blocks=99 cache.placement=packed", "ConfigError", "num_blocks"),
        ("sampling.temperature=-1", "", "sampling.temperature"),
        ("sampling.n=0", "", "sampling.n"),
    ],
)
def test_bad_input_is_one_typed_error(smollm2, call, override, kind, says):
    prompt = "word " * 40
    status, out, err = call(
        "run", *SMALL[:2], "engine.max_model_len=512", *override.split(" "), "output=json", "--prompt", prompt
    )
    error = json.loads(out)["error"]
    assert status == 2
    assert error["type"].startswith(kind)
    assert says in json.dumps(error)
    assert "Traceback" not in err


def test_truncated_weights_are_a_typed_error(smollm2, call, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(smollm2, broken)
    weights = next(broken.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    status, out, err = call("run", *SMALL, f"model.path={broken}", "--prompt", "x")
    error = json.loads(out)["error"]
    assert (status, error["type"], error["field"]) == (2, "ModelError", "model.path")
    assert "truncated" in error["message"]
    assert "Traceback" not in err


def test_a_folder_without_a_tokenizer_is_told_before_its_weights_are_read(call, tmp_path_factory, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model("llama", tmp_path_factory.getbasetemp()), bare)
    next(bare.glob("*.safetensors")).write_bytes(b"not weights")
    status, out, err = call("run", *SMALL, f"model.path={bare}", "--prompt", "x")
    error = json.loads(out)["error"]
    assert (status, error["type"]) == (2, "ModelError")
    assert "tokenizer" in error["message"]
    assert "weights" not in err


def test_stop_strings_that_are_special_tokens_stop_ids_and_logprobs(smollm2, call):
    question = ("--prompt", "What is the capital of France?")
    status, out, _ = call("run", *SMALL, *question, "sampling.stop=['<|im_end|>']", "sampling.logprobs=2")
    (output,) = json.loads(out)["outputs"]
    assert (status, output["text"], output["finish_reason"]) == (0, "The capital of France is Paris.", "stop")
    assert [told["token_id"] for told in output["logprobs"]] == output["token_ids"]
    assert {len(told["top_logprobs"]) for told in output["logprobs"]} == {2}
    first = output["logprobs"][0]
    assert first["top_logprobs"][0] == {"token_id": first["token_id"], "logprob": first["logprob"]}
    third = output["token_ids"][2]
    status, out, _ = call("run", *SMALL, *question, f"sampling.stop_token_ids=[{third}]")
    (output,) = json.loads(out)["outputs"]
    assert (output["token_ids"][-1], output["stop_reason"], output["logprobs"]) == (third, third, None)
