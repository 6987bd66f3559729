"""Settings from files, folders and keywords: one meaning each, contradictions refused, and who said what is told."""

import json
import os
import subprocess
import sys

import pytest
from models.tiny import tiny_model

import kvcore
from kvcore.cli import main
from kvcore.config.compose import compose
from kvcore.config.overrides import parse
from kvcore.config.schema import EngineRoot
from kvcore.config.sources import Files, overrides_of, said
from kvcore.engine.settings import CacheSettings, Limits, SamplingParams
from kvcore.errors import ConfigError, KVCoreError, ModelError, UnknownKeyError
from kvcore.registry.loader import installed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder elsewhere with a file, presets and an experiment; the caller is somewhere else again."""
    for name, content in {
        "mine.yaml": "cache:\n  memory: 1GiB\n  dtype_by_kind: {window: int8}\nengine.max_num_seqs: 5\ndevice: cpu\n",
        "presets/model/mine.yaml": "name: mine\ngeometry:\n  model_type: llama\n  hidden_size: 64\n"
        "  num_hidden_layers: 3\n  num_attention_heads: 4\n  max_position_embeddings: 256\n  torch_dtype: float16\n",
        "presets/device/mine.yaml": "preset: mine\nkind: cuda\nname: Mine\ncapability: [9, 0]\n"
        "memory_bytes: 9000000000\n",
        "presets/experiment/small.yaml": "# @package _global_\ndefaults:\n  - override /model: mine\n  - _self_\n"
        "cache:\n  memory: 64MiB\nengine:\n  max_model_len: 128\n",
        "twice/model/smollm2-135m.yaml": "name: theirs\n",
        "odd/model/odd.yaml": "nonsense: 1\n",
    }.items():
        file = tmp_path / "elsewhere" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "elsewhere"


def test_a_file_says_what_overrides_say_and_what_is_typed_wins(folder):
    words = ["cache.memory=1GiB", "cache.dtype_by_kind.window=int8", "engine.max_num_seqs=5", "device=cpu"]
    typed = compose(words, installed()).config
    assert compose([], installed(), EngineRoot, Files(str(folder / "mine.yaml"))).config == typed
    assert (typed.cache.memory, typed.cache.dtype_by_kind.window, typed.engine.max_num_seqs) == (2**30, "int8", 5)
    over = compose(["engine.max_num_seqs=7"], installed(), EngineRoot, Files("../elsewhere/mine.yaml")).config
    assert over.engine == Limits(max_num_seqs=7)


def test_presets_and_an_experiment_from_a_folder_elsewhere(folder, capsys):
    words = ["--config-dir", str(folder / "presets"), "output=json"]
    assert main(["plan", "model=mine", "device=mine", "model.weight_bytes=1MB", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["device"]["name"], plan["dtype"]) == ("mine", "Mine", "float16")
    assert main(["plan", "experiment=small", "device=cpu", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    # 3 layers x (k and v) x 4 heads x 16 x 2 bytes a token; 64 MiB in blocks of 16 tokens.
    assert (plan["model"], plan["bytes_per_token"], plan["num_blocks"]) == ("mine", 768, 2**26 // (16 * 768))
    assert max(map(int, plan["simultaneous"])) == 128
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("words", "files", "kind", "field"),
    [
        (["experiment=small"], Files("mine.yaml", ("presets",)), ConfigError, "cache.memory"),
        ([], Files(None, ("twice",)), ConfigError, "model"),
        (["model=odd"], Files(None, ("odd",)), UnknownKeyError, "model.nonsense"),
        (["experiment=large"], Files(None, ("presets",)), ConfigError, "experiment"),
        (["experiment=small"], Files(), ConfigError, "experiment"),
        ([], Files("nowhere.yaml"), ConfigError, "--config"),
        ([], Files(None, ("nowhere",)), ConfigError, "--config-dir"),
    ],
)
def test_two_that_conflict_and_what_is_not_there_are_typed_errors(folder, monkeypatch, words, files, kind, field):
    monkeypatch.chdir(folder)
    with pytest.raises(KVCoreError) as caught:
        compose(words, installed(), EngineRoot, files)
    assert (type(caught.value), caught.value.field) == (kind, field)
    if files.config == "mine.yaml":
        said_by = str(caught.value.got)
        assert "1GiB" in said_by
        assert "64MiB" in said_by
        # What is typed decides.
        assert compose([*words, "cache.memory=2MiB"], installed(), EngineRoot, files).config.cache.memory == 2**21


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("cache: {memori: 1GiB}", "cache.memori"),
        ("cache: [1]", "cache"),
        ("- a\n- b", "--config"),
        ("a: [", "--config"),
        ("3: 4", "--config"),
        ("output: json", "output"),
        ("sampling: {top_p: 7}", "sampling.top_p"),
        ("cache: {salt: '${nowhere}'}", "cache.salt"),
        ("plan: {lengths: [1]}", "plan.lengths"),
        ("cache.memory: !!python/object:os.system x", "--config"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_like_what_is_typed(tmp_path, content, field):
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(KVCoreError) as caught:
        compose([], installed(), EngineRoot, Files(str(tmp_path / "x.yaml")))
    assert caught.value.field == field


TEXTS = (
    "it's",
    'a "b"',
    "a,b=c",
    "x\\",
    "\\'",
    "\\\\'\\",
    " lead",
    "null",
    "true",
    "3",
    "é漢",
    "{a}",
    "[b",
    "a\tb",
    "",
)
OTHERS = (3, 1.5, True, None, [1, 2], ["a'b", "c,d"], {"a": [1, {"b": "c d"}]}, 1e-7, float("inf"), -3)


@pytest.mark.parametrize("value", [*TEXTS, *OTHERS])
def test_every_value_survives_the_way_through_hydras_grammar(value):
    (override,) = parse([f"a={said(value)}"])
    assert override.value() == value
    assert type(override.value()) is type(value)


def test_three_forms_of_the_library_give_equal_settings(tmp_path, folder):
    path = str(tiny_model("llama", tmp_path))
    common = ["engine.max_model_len=64", "cache.memory=8MiB", "sampling.max_tokens=3", "sampling.stop=[x]"]
    typed = kvcore.LLM(f"model.path='{path}'", "backend=torch", "device=cpu", "backends.torch.layout=hnd", *common)
    named = kvcore.LLM(
        path,
        backend="torch",
        device="cpu",
        backends={"torch": {"layout": "hnd"}},
        cache={"memory": "8MiB"},
        engine={"max_model_len": 64},
        sampling={"max_tokens": 3, "stop": ["x"]},
    )
    (folder / "llm.yaml").write_text("backend: torch\ndevice: cpu\nbackends: {torch: {layout: hnd}}\n")
    objects = kvcore.LLM(
        path,
        cache=CacheSettings(memory=2**23),
        engine=Limits(max_model_len=64),
        sampling=SamplingParams(max_tokens=3, stop=("x",)),
        config=str(folder / "llm.yaml"),
    )
    for other in (named, objects):
        assert other.core.settings == typed.core.settings
        assert other.default_sampling == typed.default_sampling
        assert other.default_chat is typed.default_chat
    with pytest.raises(ConfigError) as caught:
        kvcore.LLM(path, cache={"memory": "lots"})
    assert caught.value.field == "cache.memory"
    with pytest.raises(TypeError):
        kvcore.LLM(path, cash={})


def test_the_configuration_says_who_said_each_value(folder, capsys):
    files = ["--config", str(folder / "mine.yaml"), "--config-dir", str(folder / "presets")]
    assert main(["run", "--cfg", *files, "sampling.n=2", "model=mine", "output=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["config"]
    assert rows["cache.memory"] == {"value": 2**30, "from": f"--config {folder / 'mine.yaml'}"}
    assert rows["sampling.n"] == {"value": 2, "from": "command line"}
    assert rows["model.name"] == {"value": "mine", "from": "model=mine"}
    assert rows["sampling.top_p"] == {"value": 1.0, "from": "default"}
    assert main(["run", "--cfg", "sampling.n=2"]) == 0
    assert "(command line)" in capsys.readouterr().out


def test_overrides_of_dataclasses_are_what_differs():
    assert overrides_of({"engine": Limits(max_num_seqs=3), "sampling": SamplingParams()}) == ["engine.max_num_seqs=3"]


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("kvcore pl", ["plan"]),
        ("kvcore plan cache.mem", ["cache.memory="]),
        ("kvcore plan device=h1", ["device=h100-80gb"]),
        ("kvcore run cache.prefix_caching=", ["cache.prefix_caching=true", "cache.prefix_caching=false"]),
        ("kvcore run backend=tri", ["backend=triton"]),
        ("kvcore plan sampling.", []),
        ("kvcore conform where.ph", ["where.phase="]),
    ],
)
def test_the_shell_is_told_what_may_follow(line, some, capsys):
    assert main(["--completion", "words", line]) == 0
    found = capsys.readouterr().out.split()
    assert set(some) <= set(found)
    assert bool(found) is bool(some)


def test_bash_completes_what_is_typed(capsys, tmp_path):
    assert main(["--completion", "bash"]) == 0
    (tmp_path / "kvcore").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvcore "$@"\n')
    (tmp_path / "kvcore").chmod(0o755)
    script, env = capsys.readouterr().out, {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # bash cuts words at "=", so only what stands after it is put in.
    for line, words, at, want in (
        ("kvcore plan device=h1", "kvcore plan device = h1", 4, "h100-80gb"),
        ("kvcore pla", "kvcore pla", 1, "plan"),
    ):
        asked = f"COMP_LINE='{line}' COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({words}) COMP_CWORD={at}"
        code = f'{script}\n{asked}\n_kvcore 2>/dev/null\necho "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=env, timeout=60)
        assert done.stdout.split() == [want]
    assert main(["--completion", "tcsh"]) == 2


# The hub's client tries for half a minute before it gives up.
@pytest.mark.parametrize("offline", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_model_of_the_hub_that_cannot_be_had_is_a_typed_error_and_offline_is_honoured(tmp_path, offline):
    code = "from kvcore.cli import main; raise SystemExit(main(['plan', 'model.path=nobody/nothing', 'output=json']))"
    # Port 9 of this machine: nobody listens there.
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["type"], error["field"]) == (2, "ModelError", "model.path")
    assert ("HF_HUB_OFFLINE is set" in error["message"]) is (offline == "1")
    assert error["got"] == "nobody/nothing"


def test_a_model_in_the_hubs_cache_is_planned_offline_and_without_torch(tmp_path):
    """The layout of the hub's cache: refs say the commit, snapshots hold its files."""
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (snapshot / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    refs = tmp_path / "hub" / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    code = (
        "import sys; from kvcore.cli import main\n"
        "status = main(['plan', 'model.path=acme/tiny', 'device=cpu', 'output=json'])\n"
        "raise SystemExit(status or 'torch' in sys.modules)"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["model"], plan["bytes_per_token"]) == ("tiny", 2 * 2 * 4 * 16 * 2)


def test_a_folder_goes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        kvcore.LLM("acme/tiny")
