"""The wheel itself, judged: run by `make test-engines`; skipped where the wheel is not installed.

What it gets wrong is pinned here as well, so that a later version which gets it right is noticed.
"""

import ctypes
import faulthandler
import mmap
import os
import subprocess
import sys

import pytest
import torch
from backends.vllm_cpu import stand_in
from kvcore_vllm_cpu import backend as adapter
from kvcore_vllm_cpu import library
from kvcore_vllm_cpu.declaration import HEAD_DIMS, VllmCpuBackendSpec
from kvcore_vllm_cpu.install import AVX512, cpu_flags
from kvcore_vllm_cpu.options import TOKENS, VllmCpuOptions

from kvcore.testing import Case, Seq, run

pytestmark = pytest.mark.usefixtures("wheel")
K, P, D = 1, 32, 32
# The build for CPUs with AVX2 alone has no fp8, and another tanh.
HAS_AVX512 = cpu_flags() >= AVX512


@pytest.fixture(scope="module")
def ops(wheel):
    return library.load()


def failures(results):
    return [(r.case.id, r.reason) for r in results if r.outcome == "failed"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("isa", TOKENS)
def test_the_full_kit_with_two_threads(isa):
    """With one thread, `make test-engines` asks by `kvcore conform`."""
    results = run("vllm_cpu", level="full", options=VllmCpuOptions(isa), probe_refused=False)
    assert failures(results) == []
    # A case that shows nothing for a backend's smallest block is skipped; nothing else may be.
    assert all("the case cannot show" in r.reason for r in results if r.outcome == "skipped")
    assert {r.proof for r in results} == {"device"}
    assert sum(r.outcome == "passed" for r in results) > 500


SHAPES = {
    "decode": (Seq(20_000, 1), Seq(9_000, 1), Seq(31, 1)),
    "prefill": (Seq(0, 1_500),),
    "chunked": (Seq(3_000, 700), Seq(777, 300)),
}
FACTS = {
    "plain": {},
    "window": {"window": 700},
    "window.tail": {"window": 700, "own_retention": True},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    **({"fp8": {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.3}} if HAS_AVX512 else {}),
    "5 queries a head": {"gqa": 5},
    "everything": {"window": 900, "softcap": 2.0, "alibi": True, "sinks": True, "scale": 0.25},
}


@pytest.mark.usefixtures("two_threads")
def test_beyond_the_tiles_of_the_kernel():
    """Contexts that are longer than the kit's: cut into tiles, and between threads."""
    base = {"level": "L2", "check": "attend", "head_dim": 64, "block_size": 32, "num_kv_heads": 1}
    cases = [
        Case(f"X.{fact}.{shape}", phase=shape, seqs=seqs, **({**base, "gqa": 2} | changes))
        for shape, seqs in SHAPES.items()
        for fact, changes in FACTS.items()
    ]
    results = run("vllm_cpu", cases, probe_refused=False)
    assert [(r.case.id, r.outcome, r.reason) for r in results if r.outcome != "passed"] == []


def test_the_recorded_signatures_are_the_wheels(ops):
    names = (s.partition("(")[0] for s in stand_in.RECORDED["schemas"])
    told = [str(getattr(torch.ops._C, name).default._schema) for name in names]
    assert told == [f"_C::{schema}" for schema in stand_in.RECORDED["schemas"]]
    assert ops.shown == stand_in.RECORDED["version"]


@pytest.mark.parametrize("isa", TOKENS)
def test_the_head_dimensions_are_the_dispatchers(ops, isa):
    """Asked one by one, up to where the declaration ends and beyond."""

    def taken(dim, stored):
        lengths, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1]).int()
        try:
            ops.schedule(1, 1, 1, dim, lengths, torch.float32, starts, True, -1, isa, True, None, stored)
        except RuntimeError as error:
            if "Unsupported CPU attention configuration" in str(error):
                return False
            raise
        return True

    assert [dim for dim in range(8, 584, 8) if taken(dim, "auto")] == list(HEAD_DIMS)
    fp8 = [dim for dim in HEAD_DIMS if HAS_AVX512 and isa == "vec" and dim % 32 == 0]
    assert [dim for dim in range(8, 584, 8) if taken(dim, "fp8_e4m3")] == fp8


def test_the_stand_in_answers_as_the_wheel_does(ops):
    mine, theirs = (
        {r.case.id: r.outcome for r in run(spec, level="fast", probe_refused=False) if r.case.id != "L0.no_torch"}
        for spec in (stand_in.StandInSpec, "vllm_cpu")
    )
    assert mine == theirs


def test_vllm_is_not_imported_and_its_other_build_is_not_loaded_on_top():
    code = """
import sys
from kvcore_vllm_cpu.library import load
load(); load()
assert "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_library_under_vllms_name_is_an_error_and_not_the_end_of_the_process():
    code = """
import torch
from kvcore.errors import BackendUnavailableError
from kvcore_vllm_cpu.library import load
mine = torch.library.Library("_C", "DEF")
mine.define("silu(Tensor x) -> Tensor")
try:
    load()
except BackendUnavailableError:
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "told\n"


# -- what 0.32 gets wrong ----------------------------------------------------------------------------------


def test_its_write_takes_one_dtype_for_the_other_and_leaves_the_block(ops):
    """Keys of float32 in a cache of float16 of the same shape: 4 bytes go where 2 belong."""
    whole = torch.zeros(8 * K * P * D, dtype=torch.float16)  # room behind, so that nothing else is hit
    k_cache, v_cache = whole[: 4 * K * P * D].view(2, 2, K, P, D)
    k = torch.ones(2, K, D)
    ops.write(k, k, k_cache, v_cache, torch.tensor([0, 2 * P - 1]), "vec")
    assert int((whole[4 * K * P * D :] != 0).sum()) > 0


@pytest.mark.skipif(not HAS_AVX512, reason="the build for AVX2 has no fp8")
def test_its_write_cuts_fp8_where_the_nearest_code_is_wanted(ops):
    class Trusting(adapter.VllmCpuBackend):
        def write(self, layer, tensors, cache, metadata):
            key_cache, value_cache = adapter._as_the_library_reads(cache)
            slots = metadata.part.slot_mapping_T
            k, v = (tensors[name][: len(slots)] for name in ("k", "v"))
            scales = adapter._scale(layer.k_scale), adapter._scale(layer.v_scale)
            self.library.write(k, v, key_cache, value_cache, slots, metadata.isa, *scales, metadata.stored)

    class TrustingSpec(VllmCpuBackendSpec):
        @classmethod
        def create(cls, device, options):
            return Trusting(ops, options)

    where = {"cache_dtype": "fp8_e4m3/tensor"}
    results = run(TrustingSpec, where=where, probe_refused=False)
    found = failures(results)
    assert {case.partition(".")[0] for case, _ in found} == {"L1"}
    assert all("nearest to" in reason for _, reason in found)
    assert failures(run("vllm_cpu", where=where, probe_refused=False)) == []


def attend(ops, spread=1.0, softcap=0.0, causal=True, slopes=None):
    """One sequence of 8 tokens, all of them queries: keys, queries, values and outputs [8, D]."""
    k_cache, v_cache = torch.zeros(2, 2, K, P, D)
    q, k, v = torch.randn(3, 8, K, D, generator=torch.Generator().manual_seed(0))
    k = k * spread
    ops.write(k, v, k_cache, v_cache, torch.arange(P, P + 8), "vec")
    starts, length, out = torch.tensor([0, 8]).int(), torch.tensor([8]).int(), torch.empty(8, K, D)
    work = ops.schedule(1, K, K, D, length, torch.float32, starts, causal, -1, "vec", True, None)
    table = torch.ones(1, 1, dtype=torch.int32)
    ops.attend(q, k_cache, v_cache, out, starts, length, D**-0.5, causal, slopes, -1, table, softcap, work, None, None)
    return q[:, 0].double(), k[:, 0].double(), v[:, 0].double(), out[:, 0].double()


def test_its_soft_cap_is_right_up_to_88_caps_and_not_a_number_beyond(ops):
    """Tanh by exponentials that leave float32: e ** 88.7 is the last one. The build for AVX2 has none of it."""
    for spread, near in ((1.0, True), (60.0, True), (1e4, False)):
        q, k, v, out = attend(ops, spread, softcap=3.0)
        scores = q @ k.T * D**-0.5
        assert (scores.abs().max() / 3 < 88) == near
        hidden = torch.ones(8, 8).triu(1).bool()
        want = (3 * torch.tanh(scores / 3)).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        if near or not HAS_AVX512:
            torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
        else:
            assert out.isnan().any()


def test_its_bias_is_signed_and_wrong_for_keys_after_the_query(ops):
    slopes = torch.full((K,), 0.5)
    i, j = torch.arange(8)[:, None], torch.arange(8)
    for causal in (True, False):
        q, k, v, out = attend(ops, causal=causal, slopes=slopes)
        scores = (q @ k.T * D**-0.5 - 0.5 * (i - j).abs()).masked_fill((j > i) & causal, -torch.inf)
        assert (float((out - scores.softmax(-1) @ v).abs().max()) < 1e-5) == causal


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process of its own")
@pytest.mark.parametrize("padded", [False, True])
def test_it_reads_sinks_past_their_end(ops, padded):
    """Sinks at the very end of a page, before one that nobody may read: 16 are loaded at a time."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            libc = ctypes.CDLL(None)
            protected = libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0)
            sinks = torch.frombuffer(pages, dtype=torch.float32, count=2, offset=mmap.PAGESIZE - 8)
            sinks.fill_(1.0)
            given = adapter._padded(sinks) if padded else sinks
            starts, length = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
            work = ops.schedule(1, 2, 1, D, length, torch.float32, starts, True, -1, "vec", True, None)
            cache, q = torch.ones(2, K, P, D), torch.ones(1, 2, D)
            table = torch.ones(1, 1, dtype=torch.int32)
            ops.attend(
                q, cache, cache, torch.empty_like(q), starts, length, 1.0, True, None, -1, table, 0.0, work, given, None
            )
        except BaseException:
            os._exit(3)
        os._exit(protected)
    _, status = os.waitpid(child, 0)
    # Signal 11: the page was read.
    assert status == (0 if padded else 11)
