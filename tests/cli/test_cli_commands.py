"""The command line from outside: exit statuses, one JSON document, typed errors in one line."""

import io
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcore.cli import main, run
from kvcore.cli.prompts import gather, samples
from kvcore.cli.result import BAD_INPUT, DONE, Result
from kvcore.config import compose as compose_module
from kvcore.errors import ConfigError
from kvcore.registry.loader import installed


@pytest.fixture
def call(capsys):
    """Run a command line; gives (status, standard output, standard error)."""

    def run_it(*argv):
        status = main(argv)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run_it


def test_plan_takes_the_placement_that_holds_more(call, tmp_path):
    """Full layers with one KV head beside window layers with two: blocks of one size pad the smaller pages of slots."""
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 64,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("plan", "device=cpu", "cache.memory=1GiB", f"model.path={tmp_path}", "cache.block_size=16", "output=json")
    plans = {where: json.loads(call(*asked, f"cache.placement={where}")[1]) for where in ("auto", "slots", "packed")}
    assert plans["auto"]["placement"] == "packed"
    assert plans["auto"]["tokens"] == plans["packed"]["tokens"] > 1.01 * plans["slots"]["tokens"]
    same = json.loads(call(*asked, "cache.block_size=auto", "cache.num_blocks=100", "cache.memory=null")[1])
    assert same["placement"] == "slots"  # blocks are counted in slots alone


def test_every_second_layer_is_shown_as_such_everywhere(call, tmp_path):
    config = {
        "model_type": "gemma2",
        "num_hidden_layers": 24,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("device=cpu", f"model.path={tmp_path}")
    for command in ("plan", "layout", "backends"):
        _, out, _ = call(command, *asked)
        assert "L0, L2, ..., L22" in out
        assert "L1, L3, ..., L23" in out
    status, _, err = call("plan", *asked, "backend=flash_attn")
    assert (status, "of L0, L2, ..., L22;" in err) == (2, True)


def test_plan_prints_one_json_document_with_every_promised_field(call):
    status, out, err = call("plan", "device=cpu", "cache.memory=1GiB", "plan.lengths=[100,8192]", "output=json")
    plan = json.loads(out)
    assert (status, err) == (0, "")
    # One token: 30 layers x (k and v) x 3 heads x 64 x 4 bytes. One block of 16 tokens: 16 times that.
    assert plan["bytes_per_token"] == 46080
    assert plan["bytes_per_block"] == 16 * 46080
    assert plan["num_blocks"] == 2**30 // (16 * 46080)
    assert plan["needed_bytes"] == (512 + 1) * 16 * 46080
    assert plan["simultaneous"] == {"100": 1455 // 7, "8192": 1455 // 512}
    assert plan["max_concurrency"] == 2
    assert plan["num_large_pages"] is None
    promised = {
        "placement",
        "large_page_bytes",
        "tokens",
        "fits",
        "max_model_len_fits",
        "waste_fraction",
        "groups",
        "tensors",
        "ranks",
        "explain",
    }
    assert promised <= set(plan)
    group = plan["groups"][0]
    assert {
        "kind",
        "layers",
        "block_size",
        "kernel_block_size",
        "page_bytes",
        "block_stride",
        "num_blocks",
        "blocks_per_request",
    } <= set(group)


@pytest.mark.parametrize("memory", ["1KiB", "100MiB"])
def test_a_cache_too_small_is_a_plan_and_status_1(call, memory):
    status, out, _ = call("plan", "device=cpu", f"cache.memory={memory}", "output=json")
    plan = json.loads(out)
    assert (status, plan["fits"], plan["needed_bytes"]) == (1, False, 513 * 16 * 46080)
    usable = max(0, {"1KiB": 2**10, "100MiB": 100 * 2**20}[memory] // (16 * 46080) - 1)
    assert plan["max_model_len_fits"] == usable * 16
    assert call("plan", "device=cpu", f"cache.memory={memory}")[0] == 1


def test_run_refuses_a_cache_too_small_with_the_bytes_needed_and_the_length_that_fits(call):
    status, out, err = call("run", "device=cpu", "cache.memory=100MiB", "output=json")
    error = json.loads(out)["error"]
    assert status == 2
    assert error["type"] == "CapacityError"
    assert str(513 * 16 * 46080) in error["message"]
    assert "engine.max_model_len" in error["remedy"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "kind", "says"),
    [
        (["plan", "cache.blok=1"], "UnknownKeyError", "cache.block_size"),
        (["plan", "+cache.block_size=16"], "UnknownKeyError", "not accepted"),
        (["plan", "backend=nope"], "UnknownBackendError", "torch"),
        (["run", "backend=triton", "device=cpu"], "BackendUnsupportedError", "triton.interpret=true"),
        (["run", "cache.dtype=int4"], "BackendUnsupportedError", "int4"),
        (
            ["plan", "device=h100-80gb", "backend=flash_attn", "cache.block_size=24"],
            "BackendUnsupportedError",
            "multiples of 256",
        ),
        (["plan", "model.path=/nowhere/at/all"], "ModelError", "/nowhere/at/all"),
        (["plan", "cache.block_size=0"], "ConfigError", "cache.block_size"),
        (["plan", "parallel.tensor=2"], "ConfigError", "allowed: 1, 3, 9"),
        (["run", "parallel.tensor=2", "device=cpu"], "ConfigError", "allowed: 1, 3, 9"),
        (["run", "parallel.tensor=3", "device=cpu"], "NotBuiltError", "parallel.tensor"),
        (["plan", "parallel.pipeline=31"], "ConfigError", "1 to 30"),
        (["plan", "parallel.tensor=9", "parallel.decode_context=2"], "ConfigError", "allowed: 1, 3"),
        (["plan", "plan.lengths=[0]"], "ConfigError", "plan.lengths"),
        (["plan", "cache.block_size=16,32"], "ConfigError", "-m"),
        (["plan", "--prompt", "x"], "ConfigError", "--prompt"),
        (["plan", "--block-size=3"], "ConfigError", "KEY=VALUE"),
        (["run", "--prompt"], "ConfigError", "--prompt TEXT"),
        (["run", "--prompt", "   "], "ConfigError", "empty"),
        (["run", "prompts=/nowhere.txt"], "ConfigError", "prompts"),
        (["bench"], "ConfigError", "what=attention"),
        (["bench", "what=engine"], "NotBuiltError", "what"),
        (["replay", "trace=x"], "ConfigError", "NAME.csv, NAME.jsonl"),
        (["plna"], "ConfigError", "did you mean plan"),
    ],
)
def test_bad_input_is_status_2_one_line_and_the_same_as_json(call, argv, kind, says):
    status, out, err = call(*argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"kvcore: {kind}: ")
    assert says in err
    status, out, _ = call(argv[0], "output=json", *argv[1:])
    error = json.loads(out)["error"]
    assert (status, error["type"]) == (2, kind)
    assert set(error) == {"type", "message", "field", "got", "allowed", "remedy"}


def test_backends_lists_every_candidate_with_its_reason(call):
    status, out, _ = call("backends", "device=cpu", "output=json")
    (group,) = json.loads(out)["groups"]
    assert (status, group["kind"], group["chosen"]) == (0, "full", "torch")
    rows = {c["name"]: c for c in group["candidates"]}
    assert set(rows) == set(installed().backends)
    assert rows["torch"]["reason"] is None
    assert set(rows["triton"]["reason"]) == {"field", "got", "allowed"}
    assert rows["triton"]["status"] == "unsupported"
    status, out, _ = call("backends", "device=cpu", "backend=triton")
    assert status == 0
    assert "none can serve" in out


def test_plugins_and_env_tell_states_and_versions(call):
    _, out, _ = call("plugins", "output=json")
    rows = {r["name"]: r for r in json.loads(out)["plugins"]}
    assert (rows["torch"]["state"], rows["torch"]["distribution"]) == ("ok", "kvcore")
    # Installed for the tests as a library; whether its device is here is another question.
    assert (rows["triton"]["state"], rows["triton"]["reason"]) == ("ok", None)
    assert "hook kvcore_step_finished" in rows["metrics"]["provides"]
    _, out, _ = call("env", "device=cpu", "output=json")
    env = json.loads(out)
    assert env["libraries"]["torch"].startswith("2.")
    assert env["device"]["kind"] == "cpu"
    assert {r["name"] for r in env["plugins"]} == set(rows)
    assert "torch: ok" in call("env", "device=cpu")[1]


def test_layout_draws_what_its_data_says(call):
    argv = ["layout", "device=cpu", "cache.num_blocks=10", "cache.block_size=32", "backends.torch.kernel_block_size=16"]
    status, out, _ = call(*argv, "output=json")
    data = json.loads(out)
    assert status == 0
    k, v = data["caches"][0]["fields"]
    # hnd: (head 3, token 16, dim 64) in float32, k before v, kernel pages of both, two of them a block.
    assert (k["offset"], v["offset"]) == (0, 3 * 16 * 64 * 4)
    assert k["shape"] == [20, 3, 16, 64]
    assert k["strides"] == [2 * 3 * 16 * 64 * 4, 16 * 64 * 4, 64 * 4, 4]
    _, text, _ = call(*argv)
    assert "32 tokens = 2 kernel blocks of 16" in text
    assert "12288  v (head 3, token 16, dim 64) float32" in text
    assert "| 0 null | 1 | 2 | .. | 9 |" in text


def test_the_kv_first_layout_is_drawn_as_runs(call):
    _, text, _ = call("layout", "device=cpu", "cache.num_blocks=10", "backends.torch.layout=kv_first")
    assert "2 runs of 10 pieces of 12288 bytes" in text
    _, text, _ = call("layout", "device=cpu", "cache.memory=64MiB", "cache.placement=packed")
    assert "large page 0 holds the null blocks" in text


def test_a_sweep_is_one_document_and_the_worst_status(call):
    status, out, _ = call("plan", "-m", "device=cpu", "cache.num_blocks=600,100,0", "output=json")
    jobs = json.loads(out)["jobs"]
    assert [j["status"] for j in jobs] == [0, 1, 2]
    assert status == 2
    assert jobs[0]["overrides"] == ["device=cpu", "cache.num_blocks=600", "output=json"]
    assert jobs[0]["result"]["num_blocks"] == 600
    assert jobs[2]["result"]["error"]["field"] == "cache.num_blocks"


def test_an_unexpected_exception_is_told_as_a_bug(call, monkeypatch):
    def explode(*_):
        raise KeyError("surprise")

    monkeypatch.setattr(compose_module, "compose", explode)
    monkeypatch.delenv("KVCORE_DEBUG", raising=False)
    status, out, err = call("plan", "output=json")
    assert status == 3
    assert json.loads(out)["error"]["type"] == "Bug"
    assert err.count("\n") == 1
    assert "bug of kvcore" in err
    monkeypatch.setenv("KVCORE_DEBUG", "1")
    assert "Traceback" in call("plan")[2]


def test_help_of_a_command_lists_keys_of_installed_backends(call):
    status, out, _ = call("run", "--help")
    assert status == 0
    for text in ("--prompt", "backends.triton.interpret: bool = False", "plugins.metrics.jsonl", "sampling.top_p"):
        assert text in out
    assert "sampling.top_p" not in call("plan", "-h")[1]
    assert call()[0] == 0
    assert call("--version")[1].startswith("kvcore ")


def test_samples_are_six_of_unlike_lengths_and_two_begin_alike():
    texts = samples()
    assert len({len(t) for t in texts}) == len(texts) == 6
    first, second = (text.split() for text in texts[:2])
    alike = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    # A token of the default model's tokenizer never holds more than one word.
    assert alike > 3 * 16
    assert all("{" not in t for t in texts)


def test_prompts_come_from_flags_then_the_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("first line\n\n  \nsecond, with = and {braces}\n", encoding="utf-8")
    assert gather(["flag"], str(file)) == ["flag", "first line", "second, with = and {braces}"]
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        gather([], str(file))
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match="no prompts"):
        gather([], str(file))
    seen = []
    monkeypatch.setattr(run, "execute", lambda job: seen.append(job.prompts) or SimpleNamespace(text="", status=0))
    monkeypatch.setattr(sys, "stdin", io.StringIO("from standard input\n"))
    assert main(["run", "--prompt", "a=b, +c", "--prompt=d", "-", "device=cpu"]) == 0
    assert seen == [("a=b, +c", "d", "from standard input")]


LLAMA = Path(__file__).parents[1] / "data" / "hf_configs" / "meta-llama--Meta-Llama-3.1-8B_config.json"
LIGHT = """
import sys
from kvcore.cli import main
status = main({argv!r})
heavy = [m for m in {heavy!r} if m in sys.modules]
print(status, heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (["--help"], ["torch", "transformers", "numpy", "hydra", "omegaconf", "rich"]),
        (["plan", "device=auto"], ["torch", "transformers", "numpy"]),
        (["plan", f"model.path='{LLAMA}'", "device=h200-141gb", "plan.accounting=vllm"], ["torch", "transformers"]),
        (["layout", f"model.path='{LLAMA}'", "device=h200-141gb", "format=html"], ["torch", "transformers"]),
    ],
)
def test_help_and_plan_load_nothing_heavy(argv, heavy):
    code = LIGHT.format(argv=argv, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip().splitlines()[-1] == "0 []"


def test_a_prompt_that_looks_like_an_override_is_a_prompt(call, monkeypatch):
    made = SimpleNamespace(text="said", document={}, status=0)
    monkeypatch.setattr(run, "execute", lambda job: made)
    assert call("run", "device=cpu", "--prompt", "output=json")[1] == "said\n"


def test_the_last_output_wins_and_nothing_is_left_in_the_directory(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(call("plan", "device=cpu", "output=text", "output=json")[1])["fits"]
    assert list(tmp_path.iterdir()) == []
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_without_unicode_gets_the_answer_all_the_same(monkeypatch, as_json):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    found = Result({"text": "\u00e9\u2603\U0001f600"}, "\u00e9\u2603", DONE)
    monkeypatch.setattr(import_module("kvcore.cli.dispatch"), "_job", lambda *_: found)
    assert main(["plan", *(["output=json"] if as_json else [])]) == DONE
    out.seek(0)
    text = out.read()
    assert json.loads(text) == found.document if as_json else text == "\\xe9\\u2603\n"


def test_a_prompt_that_is_not_utf8_is_refused_before_the_model_is_loaded():
    with pytest.raises(ConfigError) as caught:
        gather(["bytes \udcff"], None)
    assert caught.value.field == "--prompt"


def test_a_full_disk_is_no_bug_of_ours(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module("kvcore.cli.dispatch"), "_job", lambda *_: Result({}, "text", DONE))
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["plan"]) == BAD_INPUT
    assert "cannot be written: No space left" in capsys.readouterr().err
