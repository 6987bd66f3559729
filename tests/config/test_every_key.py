"""For each command: every key that its help names changes something or is refused, and no other is taken."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import cache

import pytest

from kvcore.cli import main
from kvcore.cli.commands import NAMES, command
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.config.keys import all_keys
from kvcore.errors import ConfigError, KVCoreError, NotBuiltError
from kvcore.registry.loader import installed

GPU = ("device=h100-80gb",)
# A model with window groups and one of latents, where a key is of those.
WINDOW = (
    "device=h100-80gb",
    "model.geometry={model_type: mistral, sliding_window: 128}",
    "model.cpu_dtype=null",
    "model.parameters=1000000",
)
CHUNK = (
    *WINDOW[:1],
    "model.geometry={model_type: llama4_text, num_hidden_layers: 4, attention_chunk_size: 256}",
    "model.geometry.intermediate_size_mlp=64",
    "model.parameters=1000000",
)
LATENT = (
    *WINDOW[:1],
    "model.geometry={model_type: deepseek_v3, kv_lora_rank: 512, qk_rope_head_dim: 64, qk_nope_head_dim: 64, "
    "v_head_dim: 64}",
    "model.parameters=1000000",
)
ENCODER = (
    *WINDOW[:1],
    # The numbers of the preset beside which these fields stand.
    "model.geometry={model_type: whisper, d_model: 576, decoder_layers: 30, decoder_attention_heads: 9}",
    "model.geometry.max_target_positions=8192",
    "model.geometry.num_key_value_heads=9",
    "model.parameters=1000000",
)
WINDOW_AND_FULL = (
    *WINDOW[:1],
    "model.geometry={model_type: gemma2, num_hidden_layers: 6, sliding_window: 128}",
    "model.parameters=1000000",
)
STATES = (
    *WINDOW[:1],
    "model.geometry={model_type: lfm2, num_hidden_layers: 6, layer_types: [conv, conv, full_attention, conv, conv, "
    "full_attention]}",
    "model.parameters=1000000",
)
OF_KIND = {"window": WINDOW, "chunk": CHUNK, "latent": LATENT, "encoder": ENCODER, "full": GPU}
# Another value of a key, and beside what it shows; where neither choices nor type tell.
OTHER = {
    "backends.vllm_cpu.isa": "vec16",
    "model.path": "/nowhere",
    "model.weight_bytes": "7GiB",
    "model.name": "other",
    "model.chat": "false",
    "model.package": "other==1",
    "model.cpu_dtype": "bfloat16",
    "model.dtype": "float16",
    "chat": "false",
    "model.geometry": "{num_hidden_layers: 3}",
    "model.parameters": "99",
    "cache.block_size": "64",
    "cache.content": "nothing-such",
    "cache.retention": "nothing-such",
    "cache.memory": "1GiB",
    "cache.num_blocks": "700",
    "cache.utilization": "0.5",
    "cache.eviction": "nothing-such",
    "cache.dtype": "fp8_e4m3",
    "cache.mla": "expanded",
    "cache.placement": "packed",
    "engine.max_model_len": "100",
    "engine.max_num_seqs": "3",
    "engine.max_num_batched_tokens": "100000",
    "backend": "triton",
    "device.capability": "[7,0]",
    "device.kind": "rocm",
    "sampling.stop": "[x]",
    "sampling.stop_token_ids": "[3]",
    "plan.lengths": "[77]",
    "plan.accounting_version": "min_block",
    "parallel.tensor": "3",
    "parallel.pipeline": "2",
    "parallel.decode_context": "3",
    "prompts": "/nowhere",
    "a": "nobody",
    "b": "nobody",
    "case": "none",
    "html": "page.html",
    "jobs": "2",
    "what": "attention",
    "output": "text",
}
BESIDE = {
    "engine.max_model_len": WINDOW,
    "engine.max_num_seqs": CHUNK,
    "engine.max_num_batched_tokens": CHUNK,
    "cache.placement": ("device=cpu", "backend=torch", "backends.torch.layout=kv_first"),
    "cache.scales": (*GPU, "cache.dtype=int8"),
    "cache.mla": LATENT,
    "model.cpu_dtype": ("device=cpu",),
    "parallel.decode_context": (*LATENT, "parallel.tensor=9"),
    "plan.accounting_version": (*WINDOW_AND_FULL, "plan.accounting=vllm"),
    "plan.accounting_one_stage": (*GPU, "plan.accounting=vllm", "parallel.pipeline=2"),
    "cache.prefix_caching": (*STATES, "plan.accounting=vllm"),
    "device.capability": (*GPU, "backend=flash_attn"),
    "device.arch": ("device=mi300x-192gb", "backend=triton", "model.dtype=bfloat16", "cache.dtype=fp8_e4m3"),
}


def other_value(key) -> str:
    if key.path in OTHER:
        return OTHER[key.path]
    if key.choices:
        return next(c for c in key.choices if c not in (key.default, "auto"))
    if key.path.startswith("cache.block_size_by_kind."):
        return "64"
    if key.path.startswith("backend_by_kind."):
        return "torch"
    if key.type == "bool":
        return str(not key.default).lower()
    if key.type in ("int", "float"):
        return str((key.default or 0) + (1 if key.type == "int" else 0.5) if key.most is None else 0.25)
    return "another"


def beside(key) -> tuple[str, ...]:
    if key.path in BESIDE:
        return BESIDE[key.path]
    if (kind := key.path.rpartition(".")[2]) in OF_KIND and "by_kind" in key.path:
        return OF_KIND[kind]
    if key.path.endswith((".emulate", ".interpret")):
        return ("device=cpu", f"backend={key.path.split('.')[1]}")
    if (found := re.match(r"backends\.(\w+)\.", key.path)) is not None:
        device = ("device=cpu",) if found[1] in ("torch", "vllm_cpu") else GPU
        return (*device, f"backend={found[1]}", "model.dtype=bfloat16")
    return GPU


@cache
def answer(*words: str) -> str:
    """All that a command says, on both streams."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    assert status in (0, 1, 2), err.getvalue()
    return f"{status} {out.getvalue()}" + (err.getvalue() if status == 2 else "")


@pytest.mark.parametrize(
    "name", ["plan", *(pytest.param(name, marks=pytest.mark.long) for name in ("layout", "backends"))]
)
def test_every_key_of_the_planning_commands_changes_what_is_said(name):
    known = {k.path for k in all_keys(installed(), command(name).root)}
    idle = []
    for key in all_keys(installed(), command(name).root):
        words = [w for w in beside(key) if w.startswith(("model.geometry", "device=")) or w.partition("=")[0] in known]
        words = [w for w in words if w.partition("=")[0] != key.path]
        before = answer(name, *words, "output=json")
        if before == answer(name, *words, "output=json", f"{key.path}={other_value(key)}"):
            idle.append((key.path, other_value(key)))
    assert not idle


def everything() -> set[str]:
    """Every key of every command, the unbuilt ones included."""
    roots = [command(name).root for name in NAMES]
    return {k.path for root in roots for k in all_keys(installed(), root)} | {k for r in roots for k in r.UNBUILT}


@pytest.mark.parametrize("name", NAMES)
def test_every_other_key_is_refused_with_its_name(name):
    root = command(name).root
    taken = {k.path for k in all_keys(installed(), root)} | set(root.UNBUILT)
    others = everything() - taken
    assert name == "run" or len(others) > 10
    for path in others:
        with pytest.raises(KVCoreError) as caught:
            compose([f"{path}=null"], installed(), root)
        assert caught.value.field == path
    for path in root.UNBUILT:
        with pytest.raises(NotBuiltError) as caught:
            compose([f"{path}=7"], installed(), root)
        assert caught.value.field == path
        compose([f"{path}={root.UNBUILT[path][0]}"], installed(), root)  # what says "without it" is no error


# By hand, so that a key which creeps into a root is seen.
USELESS = {
    "run": ("plan.lengths", "where.phase", "a", "html", "what"),
    "plan": ("html", "a", "what", "sampling.top_p", "cache.salt", "cache.eviction", "model.package", "chat", "prompts"),
    "layout": ("plan.lengths", "engine.max_num_seqs", "device.name", "cache.hash", "level"),
    "backends": ("cache.memory", "cache.sanitize", "engine.max_num_seqs", "model.weight_bytes", "device.memory_bytes"),
    "plugins": ("device", "model.path", "cache.dtype", "plugins.metrics.jsonl"),
    "env": ("model.path", "sampling.n", "backend", "cache.memory"),
    "conform": ("cache.dtype", "engine.max_num_seqs", "case", "model.dtype", "plugins.metrics.jsonl"),
    "diff": ("backend", "backend_by_kind.window", "level", "where.phase", "plan.lengths"),
    "bench": ("cache.memory", "model.path", "sampling.n", "level", "prompts"),
    "replay": ("sampling.max_tokens", "cache.salt", "chat", "model.package", "device.name", "plan.lengths", "prompts"),
}


def test_keys_that_would_change_nothing_are_refused(capsys):
    assert set(USELESS) == set(NAMES)
    for name, paths in USELESS.items():
        for path in paths:
            assert main([name, f"{path}=1", "output=json"]) == 2
            error = json.loads(capsys.readouterr().out)["error"]
            assert (error["type"], error["field"]) == ("UnknownKeyError", path), name
    assert main(["plan", "html=x", "a=nonsense", "what=engine"]) == 2


def test_help_names_the_keys_that_are_taken_and_nothing_unbuilt():
    for name in NAMES:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main([name, "--help"]) == 0
        root = command(name).root
        named = re.findall(r"^  ([a-z_0-9.]+): ", out.getvalue(), re.M)
        assert named == [k.path for k in all_keys(installed(), root)]
        assert not [word for word in root.UNBUILT if word in out.getvalue()]


def told(words, root) -> object:
    """What an engine would be built from and asked, or the error."""
    try:
        composed = compose(words, installed(), root)
        config, built = composed.config, build(composed, installed(), purpose="plan")
    except KVCoreError as error:
        return str(error)
    rest = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("model", "device", "backends")}
    return built, rest


def test_every_key_of_run_reaches_the_engine_or_what_it_is_asked():
    """`test_every_key_of_the_planning_commands...` has shown that planning reads the settings; here what is left."""
    root, idle = command("run").root, []
    planned = {k.path for k in all_keys(installed(), command("plan").root)}
    for key in all_keys(installed(), root):
        if key.path in planned or key.path == "model.package":  # read only where the weights are fetched
            continue
        words = beside(key)
        if told(words, root) == told([*words, f"{key.path}={other_value(key)}"], root):
            idle.append((key.path, other_value(key)))
    assert not idle


@pytest.mark.parametrize("name", ["plugins", "env"])
def test_every_key_of_the_listing_commands_changes_what_is_said(name):
    idle = []
    for key in all_keys(installed(), command(name).root):
        words = ("device=h100-80gb",) if key.path.startswith("device.") else ()
        before = answer(name, *words, "output=json")
        if before == answer(name, *words, "output=json", f"{key.path}={other_value(key)}"):
            idle.append((key.path, other_value(key)))
    assert not idle


def record(monkeypatch, module, name) -> list:
    """What a command asks of the function that does its work, which is then enough."""
    asked = []

    def recorder(*args, registry=None, report=None, progress=None, **named):
        asked.append((args, named))
        raise ConfigError("enough")

    monkeypatch.setattr(module, name, recorder)
    return asked


def check_that_every_key_arrives(name, asked, words_of):
    for key in all_keys(installed(), command(name).root):
        # What is made of the answer (tests/cli look at it), what is read where weights are fetched, what observers
        # write, and what is switched on already where the device is missing.
        if key.path in ("output", "html", "slowest", "model.name", "model.package"):
            continue
        if key.path.startswith("plugins.") or key.path.endswith((".emulate", ".interpret")):
            continue
        words = [w for w in words_of(key) if w.partition("=")[0] != key.path]
        main([name, *words])
        assert main([name, *words, f"{key.path}={other_value(key)}"]) == 2
        # A value that is refused does not come as far: twice asked, or once and told why. Without what a command
        # has no default for (a=, b=) it is refused in the first place.
        needed = key.path in ("a", "b")
        assert len(asked) == (0 if needed else 1) or repr(asked[0]) != repr(asked[-1]), key.path
        asked.clear()


def test_every_key_of_conform_reaches_the_kit(monkeypatch, tmp_path):
    from kvcore.testing.report import conform as kit

    monkeypatch.chdir(tmp_path)
    asked = record(monkeypatch, kit, "conform")
    check_that_every_key_arrives("conform", asked, lambda key: ("device=cpu", "backend=torch"))


def test_every_key_of_bench_reaches_what_is_measured(monkeypatch):
    from kvcore_vllm_cpu.declaration import VllmCpuBackendSpec

    from kvcore.testing.bench import rows, timing

    # No kernel runs: its library need not be here.
    monkeypatch.setattr(VllmCpuBackendSpec, "unavailable", classmethod(lambda spec, options: None))
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device, size: 1e9)
    asked = record(monkeypatch, rows, "write_rows")
    monkeypatch.setattr(rows, "attention_rows", rows.write_rows)

    def words(key):
        backend = re.match(r"backends\.(\w+)\.", key.path)
        return "device=cpu", "what=write", "model.dtype=bfloat16", f"backend={backend[1] if backend else 'torch'}"

    check_that_every_key_arrives("bench", asked, words)


def test_every_key_of_diff_reaches_what_is_compared(monkeypatch):
    from kvcore.config import build as building
    from kvcore.diff import model

    real = building.build
    monkeypatch.setattr(building, "build", lambda composed, registry, **_: real(composed, registry, purpose="plan"))
    asked = record(monkeypatch, model, "diff_model")

    known = {k.path for k in all_keys(installed(), command("diff").root)}

    def words(key):
        # Kernels run on the device that is here; facts of another are for planning, and refused.
        words = [w for w in beside(key) if w.startswith("model.geometry") or w.partition("=")[0] in known]
        return "a=torch", "b=torch", *(w for w in words if not w.startswith(("device=", "backend=")))

    check_that_every_key_arrives("diff", asked, words)
