"""The conformance kit over the emulations: everything that must be served is, at the proof level `emulated`.

A pass shows that the adapters call the libraries rightly. It says nothing about the libraries' kernels.
"""

import pytest
from backends.flash.flash_cases import FLASH_ATTN, FLASHINFER, case, cases

from kvcore.registry.loader import installed
from kvcore.testing import Case, run

SERVED = [("flash_attn", c) for c in cases(FLASH_ATTN, 256)] + [("flashinfer", c) for c in cases(FLASHINFER, 16)]


def one(backend: str, chosen: Case, **options):
    (result,) = run(backend, [chosen], **options)
    return result


@pytest.mark.parametrize(("backend", "chosen"), SERVED, ids=[f"{b}-{c.id}" for b, c in SERVED])
def test_what_must_be_served(backend, chosen):
    result = one(backend, chosen)
    assert (result.outcome, result.reason) == ("passed", None)
    assert result.proof == "emulated"
    assert not result.proven


@pytest.mark.parametrize(("backend", "page"), [("flash_attn", 256), ("flashinfer", 16)])
@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": True},
        {"chunk": 8},
        {"dtype": "float32"},
        {"dtype": "float64"},
        {"head_dim_v": 32},
        {"cache_dtype": "int8", "quant": "token_head"},
    ],
    ids=str,
)
def test_what_is_refused_is_refused_before_a_kernel_runs(backend, page, changes):
    result = one(backend, case("refused", "decode", page, **changes))
    assert result.outcome == "unsupported"
    assert next(iter(changes)).split("_v")[0] in result.reason or "unlike_dims" in result.reason


def test_only_flash_attn_has_alibi_and_only_flashinfer_fp8():
    assert one("flashinfer", case("alibi", "decode", 16, alibi=True)).outcome == "unsupported"
    fp8 = {"cache_dtype": "fp8_e4m3", "quant": "tensor"}
    assert "FlashAttention 3" in one("flash_attn", case("fp8", "decode", 256, **fp8)).reason
    assert "FlashAttention 4" in one("flash_attn", case("sinks", "decode", 256, sinks=True)).reason


@pytest.mark.parametrize("decode", ["tensor_cores", "cuda_cores"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("gqa", [1, 4, 8])
def test_both_decode_kernels_of_flashinfer(decode, layout, gqa):
    options = installed().backends["flashinfer"].Config(decode=decode, layout=layout, emulate=True)
    result = one("flashinfer", case("decode", "mixed", 16, gqa=gqa, num_kv_heads=1, lse=True), options=options)
    assert (result.outcome, result.reason) == ("passed", None)


def test_a_group_size_without_a_cuda_core_kernel_is_refused_where_it_is_asked_for():
    options = installed().backends["flashinfer"].Config(decode="cuda_cores", emulate=True)
    result = one("flashinfer", case("gqa", "decode", 16, gqa=5, num_kv_heads=1), options=options)
    assert (result.outcome, "group_size=5" in result.reason) == ("unsupported", True)


# FlashAttention's pages of 256 tokens make its kit a matter of minutes: all of it is in the long run.
def test_the_quick_kit_of_flashinfer():
    results = run("flashinfer")
    assert {r.proof for r in results} == {"emulated"}
    assert [(r.case.id, r.reason) for r in results if r.outcome not in ("passed", "unsupported")] == []
    assert sum(r.outcome == "passed" for r in results) > 100


@pytest.mark.parametrize("backend", ["flash_attn"])
def test_declaration_and_robustness_of_flash_attn(backend):
    where = {"phase": "decode"}
    results = run(backend, where=where)
    assert [(r.case.id, r.reason) for r in results if r.outcome not in ("passed", "unsupported")] == []
    assert sum(r.outcome == "passed" for r in results) > 20


@pytest.mark.long
@pytest.mark.parametrize("backend", ["flash_attn", "flashinfer"])
def test_the_full_kit(backend):
    results = run(backend, level="full")
    assert [(r.case.id, r.reason) for r in results if r.outcome not in ("passed", "unsupported")] == []
