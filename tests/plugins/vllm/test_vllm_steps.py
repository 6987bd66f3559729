"""Steps that a real vLLM made, written down by `record.py`: what the adapter answers is dense attention over slots."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plugins.vllm.slots import dense

from kvcore.backend import IntegrityError

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "vllm_steps.json").read_text())
RUNS = RECORDED["runs"]


def plain_arguments(layer):
    """A layer's arguments as vLLM gave them; of a tensor only its being there was written down."""
    given = dict(layer["arguments"])
    if given.get("sinks") is not None:
        torch.manual_seed(len(layer["name"]))
        given["sinks"] = torch.randn(given["num_heads"])
    return given


class Replay:
    """The adapter's layers over memory like vLLM's, and beside each a dictionary of slots."""

    def __init__(self, bridge, run):
        seqs, tokens = run["limits"]
        self.config = bridge.vllm.Config(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        self.arguments = {layer["name"]: plain_arguments(layer) for layer in run["layers"]}
        for name, given in self.arguments.items():
            self.config.add(name, bridge.layer.KvcoreLayer, **given)
        self.modules = self.config.compilation_config.static_forward_context
        self.builders = [self.builder(bridge, group) for group in run["groups"]]
        self.layers = [group["layers"] for group in run["groups"]]
        self.memory = {layer["name"]: self.blocks(layer["blocks"]) for layer in run["layers"]}
        self.slots = {name: {} for name in self.arguments}

    def builder(self, bridge, group):
        fields = group["fields"]
        kind = getattr(bridge.vllm, group["spec"])
        names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "sliding_window")
        dtype = getattr(torch, fields["dtype"].removeprefix("torch."))
        spec = kind(dtype=dtype, **{n: fields[n] for n in names if n in fields})
        assert spec.page_size_bytes == group["bytes"]
        return bridge.builder.StepBuilder(spec, group["layers"], self.config, torch.device("cpu"))

    @staticmethod
    def blocks(lie):
        """Blocks where vLLM had them, full of what must not matter."""
        size = sum((n - 1) * s for n, s in zip(lie["shape"], lie["stride"], strict=True)) + 1
        return torch.full((size,), float("nan")).as_strided(lie["shape"], lie["stride"])

    def step(self, bridge, told, seed):
        """Largest difference between the adapter's answer and the oracle's, over the layers of a group."""
        number = {n: torch.tensor(told[n], dtype=getattr(torch, d)) for n, d in told["dtypes"].items()}
        metadata = bridge.vllm.CommonAttentionMetadata(
            query_start_loc=number["query_start_loc"],
            query_start_loc_cpu=number["query_start_loc"].clone(),
            seq_lens=number["seq_lens"],
            block_table_tensor=number["block_table"],
            slot_mapping=number["slot_mapping"],
            causal=told["causal"],
        )
        builder = self.builders[told["group"]]
        step = builder.build(0, metadata)
        worst = [torch.zeros(1).double()]
        for at, name in enumerate(self.layers[told["group"]]):
            given, module = self.arguments[name], self.modules[name]
            torch.manual_seed(seed * 100 + at)
            tokens, dim = told["query_start_loc"][-1], given["head_size"]
            q = torch.randn(tokens, given["num_heads"], dim)
            k, v = torch.randn(2, tokens, given["num_kv_heads"], dim)
            out = torch.full_like(q, float("nan"))
            module.impl.forward(module, q, k, v, self.memory[name], step, out)
            self.slots[name].update(zip(told["slot_mapping"], zip(k.double(), v.double(), strict=True), strict=True))
            want = dense(q.double(), told, self.slots[name], given, builder.kv_cache_spec.block_size)
            worst.append((out - want).abs().flatten())
        return float(torch.cat(worst).max())


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_step_is_dense_attention_over_vllms_slots(bridge, monkeypatch, name):
    run = RUNS[name]
    monkeypatch.setenv("KVCORE_OPTIONS", run["options"])
    replay = Replay(bridge, run)
    for number, told in enumerate(run["steps"]):
        assert replay.step(bridge, told, number) < 1e-5, number


def test_a_slot_that_is_one_off_is_noticed(bridge):
    run = RUNS["mistral_window"]
    replay = Replay(bridge, run)
    builder = replay.builders[0]
    build = type(builder).build

    def shifted(self, prefix, metadata):
        return build(
            self,
            prefix,
            bridge.vllm.CommonAttentionMetadata(**vars(metadata) | {"slot_mapping": metadata.slot_mapping + 1}),
        )

    replay.builders[0] = SimpleNamespace(
        kv_cache_spec=builder.kv_cache_spec, build=lambda *given: shifted(builder, *given)
    )
    worst = [replay.step(bridge, told, number) for number, told in enumerate(run["steps"][:3])]
    assert not torch.tensor(worst).max() < 1e-2


def test_what_was_recorded_touches_what_the_adapter_must_handle():
    """Chunked prefill, mixed steps, reused prefixes, several groups, several masks, smaller kernel blocks."""
    steps = [s for run in RUNS.values() for s in run["steps"]]
    counts = [[b - a for a, b in zip(s["query_start_loc"], s["query_start_loc"][1:], strict=False)] for s in steps]
    assert any(1 in c and max(c) > 1 for c in counts)
    assert any(
        max(c) > 1 and length > c[i]
        for s, c in zip(steps, counts, strict=True)
        for i, length in enumerate(s["seq_lens"])
        if c[i] > 1
    )
    assert any(len(run["groups"]) > 1 for run in RUNS.values())
    masks = [{layer["arguments"].get("sliding_window") for layer in run["layers"]} for run in RUNS.values()]
    assert any(len(m) > 1 for m in masks)
    assert any(layer["arguments"].get("logits_soft_cap") for run in RUNS.values() for layer in run["layers"])
    assert any(layer["arguments"].get("sinks") for run in RUNS.values() for layer in run["layers"])
    assert any("kernel_block_size" in run["options"] for run in RUNS.values())


def test_a_step_that_is_not_causal_is_refused(bridge):
    replay = Replay(bridge, RUNS["mistral_window"])
    with pytest.raises(IntegrityError, match="causal"):
        replay.step(bridge, RUNS["mistral_window"]["steps"][0] | {"causal": False}, 0)


def test_a_profiling_run_has_no_step_and_gives_zeros(bridge):
    replay = Replay(bridge, RUNS["mistral_window"])
    (name, given), *_ = replay.arguments.items()
    out = torch.full((3, given["num_heads"], given["head_size"]), float("nan"))
    module = replay.modules[name]
    module.impl.forward(module, out, None, None, torch.empty(0), None, out)
    assert float(out.abs().max()) == 0
