"""Quantized caches, bit for bit: the interpreted write kernel, the torch encode, and every 16-bit number."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from kvcore_torch.quant import encode
from kvcore_triton.backend import TritonBackend
from kvcore_triton.declaration import TritonBackendSpec, TritonOptions
from kvcore_triton.kernels.attention import number
from kvcore_triton.launches import LaunchPlan
from kvcore_triton.targets import TARGETS

from kvcore.attention.backend import AttentionLayer
from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.query import AttentionQuery
from kvcore.errors import BackendUnsupportedError
from kvcore.memory.arena import Arena
from kvcore.memory.copy import copy_blocks
from kvcore.memory.dtypes import torch_dtype
from kvcore.memory.kernels.launch import Launcher
from kvcore.memory.views import field_tensors
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.retention import Full, Window

HEADS, DIM, TOKENS = 3, 40, 24
FORMATS = [(d, g) for d in ("int8", "fp8_e4m3", "fp8_e5m2") for g in ("tensor", "head", "token_head")]


@triton.jit
def read_half_bytes(codes_ptr, out_ptr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, number(tl.load(codes_ptr + at), True))


def values(seed):
    """Numbers of every size, ties, values beyond every format, a token of zeros, signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 4, TOKENS)[:, None, None]
    x = torch.randn(TOKENS, HEADS, DIM, generator=generator) * sizes
    x[3] = 0
    x[4, 0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0, 0.0])
    x[5, 1, :8] = torch.tensor([448.0, 464.0, 480.0, -1e9, 57344.0, 61440.0, 1e-9, 2.0**-10])
    return x


def layer_of(dtype, granularity, model="float32"):
    query = AttentionQuery("kv", model, dtype, HEADS, HEADS, DIM, DIM, quant=granularity)
    scales = {"tensor": torch.tensor(0.37), "head": torch.tensor([0.37, 1.0, 11.0]), "token_head": None}
    return AttentionLayer(CacheId(0), query, k_scale=scales[granularity], v_scale=scales[granularity])


def written(layer, fresh, cache, heads_first, slots, size=16):
    """`cache` after the interpreted write kernel."""

    class Step:
        slot_mapping_T, kernel_block_size = slots, size

    backend = TritonBackend(
        "cpu", TritonOptions(interpret=True), target=TARGETS["interpreter"], launcher=Launcher(interpret=True)
    )
    backend.write(layer, fresh, cache, LaunchPlan(Step, heads_first, ()))


def empty(dtype, granularity, heads_first, blocks=4):
    shape = (blocks, HEADS, 16, DIM) if heads_first else (blocks, 16, HEADS, DIM)
    cache = {n: torch.zeros(shape, dtype=torch.uint8).view(torch_dtype(dtype)) for n in ("k", "v")}
    if granularity == "token_head":
        cache |= {f"{n}_scale": torch.full(shape[:3], 9.0) for n in ("k", "v")}
    return cache


def at_slots(field, slots, heads_first):
    field = field.view(torch.uint8) if field.itemsize == 1 else field
    field = field.transpose(1, 2) if heads_first else field
    return field.flatten(0, 1)[slots]


@pytest.mark.parametrize(("dtype", "granularity"), FORMATS)
@pytest.mark.parametrize("model", ["float32", "bfloat16", "float16"])
def test_written_bits_are_those_of_the_torch_encode(dtype, granularity, model):
    heads_first = model != "float16"
    layer = layer_of(dtype, granularity, model)
    fresh = {n: values(i).to(torch_dtype(model)) for i, n in enumerate(("k", "v"))}
    fresh = {n: x.clamp(-60000, 60000) if model == "float16" else x for n, x in fresh.items()}
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:TOKENS]
    cache = empty(dtype, granularity, heads_first)
    written(layer, fresh, cache, heads_first, slots)
    for name in ("k", "v"):
        for field, want in encode(layer, name, fresh[name], torch_dtype(dtype)).items():
            got = at_slots(cache[field], slots, heads_first)
            assert torch.equal(got, want.view(torch.uint8) if want.itemsize == 1 else want), field


def test_e5m2_bytes_as_numbers():
    """All 256 codes, NaN and infinities too: the half that the attention kernel makes is torch's number."""
    codes, numbers = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=torch.float16)
    Launcher(interpret=True)(read_half_bytes, (1,), {"codes_ptr": codes, "out_ptr": numbers})
    want = codes.view(torch.float8_e5m2).to(torch.float16)
    assert torch.equal(numbers.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(numbers.isnan(), want.isnan())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_fp8_codes_of_every_half(name):
    """All 65,536 numbers of bfloat16, NaN and infinities too, against torch's own conversion."""
    from kvcore_triton.kernels.write import write_step
    from kvcore_triton.targets import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ

    kind = next(f for f in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ) if f.torch_name == name)
    numbers = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    x = numbers.view(16, 8, 512)
    codes = torch.zeros(2, 16, 8, 512, dtype=torch.uint8)
    one = torch.ones(1)
    names = ("k", "v")
    args = {f"{n}_ptr": x for n in names} | {f"{n}_field_ptr": codes for n in names}
    args |= {f"{n}_scale_ptr": one for n in names} | {"slots_ptr": torch.arange(16)}
    for n in names:
        args |= {
            f"{n}_value_token": 4096,
            f"{n}_value_head": 512,
            f"{n}_block": 65536,
            f"{n}_token": 4096,
            f"{n}_head": 512,
        }
        args |= {f"{n}_scale_{axis}": 0 for axis in ("block", "token", "head")}
    args |= {"UNIT": 1, "FIELD_UNIT": 1}
    args |= {
        "block_size": 16,
        "num_heads": 8,
        "D": 512,
        "DV": 512,
        "DP": 512,
        "DVP": 512,
        "HEADS": 8,
        "SCALES": 1,
        "FORMAT": 2,
        "TOP": kind.top,
        "MANTISSA": kind.mantissa,
        "BIAS": kind.bias,
        "SIGNED_ZERO": kind.signed_zero,
    }
    Launcher(interpret=True)(write_step, (16, 1), args)
    want = x.float().clamp(-kind.top, kind.top).to(getattr(torch, name))
    nan = torch.isnan(x)
    assert torch.equal(codes[0][~nan], want.view(torch.uint8)[~nan])
    assert bool(torch.isnan(codes[0].view(getattr(torch, name)).float()[nan]).all())


@pytest.mark.parametrize(("dtype", "granularity"), [("int8", "token_head"), ("fp8_e4m3", "token_head")])
@pytest.mark.parametrize("layout", [0, 1])
def test_scales_survive_packed_pages_and_block_copies(dtype, granularity, layout):
    """Pages padded by a neighbour of another size; what is copied reads back as it was written."""
    content = KVHeads(HEADS, DIM, dtype=dtype, quant=Quant(granularity))
    other = KVHeads(5, 24, dtype="float32")
    options = TritonOptions(interpret=True)
    specs = {
        CacheId(0): KVCacheSpec(content, Full()),
        CacheId(1): KVCacheSpec(content, Full()),
        CacheId(2): KVCacheSpec(other, Window(20)),
    }
    offers = {
        c: LayoutOffer("triton", (TritonBackendSpec.layouts(s, DeviceFacts("cpu"), options)[layout],), 63)
        for c, s in specs.items()
    }
    config = plan(specs, offers, Budget(memory=1 << 20), Limits(64), placement="packed", block_size=32).configs[0]
    arena = Arena(config.total_bytes)
    group = config.group_of(CacheId(0))
    blocks = list(range(group.blocks_per_large_page, group.num_blocks))
    source, target = blocks[0], blocks[-1]
    slots = torch.arange(source * group.block_size, source * group.block_size + TOKENS)
    wanted = {}
    for i, cache in enumerate((CacheId(0), CacheId(1))):
        fresh = {n: values(10 * i + j) for j, n in enumerate(("k", "v"))}
        layer = layer_of(dtype, granularity)
        written(layer, fresh, field_tensors(arena, config, cache), layout == 1, slots, 32)
        stored = [encode(layer, n, fresh[n], torch_dtype(dtype)) for n in ("k", "v")]
        wanted[cache] = stored[0] | stored[1]
    copy_blocks(arena, config, group.index, [(source, target)])
    moved = slots + (target - source) * group.block_size
    for cache, fields in wanted.items():
        views = field_tensors(arena, config, cache)
        for field, want in fields.items():
            for place in (slots, moved):
                got = at_slots(views[field], place, layout == 1)
                assert torch.equal(got, want.view(torch.uint8) if want.itemsize == 1 else want), field


@pytest.mark.parametrize(
    ("facts", "dtype", "served"),
    [
        (DeviceFacts("cuda", capability=(8, 0)), "fp8_e4m3", False),
        (DeviceFacts("cuda", capability=(8, 6)), "fp8_e4m3", False),
        (DeviceFacts("cuda", capability=(8, 9)), "fp8_e4m3", True),
        (DeviceFacts("cuda", capability=(9, 0)), "fp8_e4m3", True),
        (DeviceFacts("cuda", capability=(8, 0)), "fp8_e5m2", True),
        (DeviceFacts("rocm", arch="gfx942:sramecc+"), "fp8_e4m3", True),
        (DeviceFacts("rocm", arch="gfx1100"), "fp8_e4m3", False),
    ],
)
def test_fp8_where_the_device_has_it(facts, dtype, served):
    spec = KVCacheSpec(KVHeads(2, 64, dtype=dtype, quant=Quant("tensor")), Full())
    if served:
        assert TritonBackendSpec.layouts(spec, facts, TritonOptions())
    else:
        with pytest.raises(BackendUnsupportedError, match=dtype):
            TritonBackendSpec.layouts(spec, facts, TritonOptions())


BAD = [{"block_m": 8}, {"block_n": 48}, {"num_warps": 3}, {"num_stages": -1}, {"num_splits": True}]


@pytest.mark.parametrize("options", [*BAD, {"block_m": "16"}])
def test_bad_options_are_refused(options):
    from kvcore.errors import ConfigError

    with pytest.raises(ConfigError, match=r"backends\.triton\."):
        TritonOptions(**options)
