"""The emulations: the libraries' own Python over our modules. The traps they guard are seen to snap."""

import os
import subprocess
import sys

import flashinfer
import pytest
import torch
from backends.flash.flash_cases import case
from flashinfer import decode, prefill
from kvcore_flash_attn.declaration import FlashAttnOptions
from kvcore_flash_attn.emulation import load_interface
from kvcore_flash_attn.variants import FA2
from kvcore_flashinfer import library
from kvcore_flashinfer.declaration import FlashInferOptions
from kvcore_flashinfer.emulation import active
from kvcore_flashinfer.library import KEYWORDS, load

from kvcore.errors import BackendUnavailableError, ConfigError, NotBuiltError
from kvcore.testing import run

LENGTHS = (5, 300)


def flash_inputs(page=256, dtype=torch.float16):
    torch.manual_seed(0)
    k, v = torch.randn(2, 6, page, 2, 64).to(dtype)
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    q = torch.randn(2, 1, 4, 64).to(dtype)
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_seqlens": 5}, r"seqlens_k must have shape \(2\)"),  # one for each *page*, not sequence
        ({"cache_seqlens": torch.tensor(LENGTHS)}, "seqlens_k must have dtype int32"),
        ({"block_table": torch.tensor([[3, 0], [1, 4]])}, "block_table must have dtype torch.int32"),
        ({"block_table": torch.tensor([[3, 0], [1, 9]], dtype=torch.int32)}, "emulation: .* not there"),
        ({"block_table": torch.tensor([[3], [1]], dtype=torch.int32)}, "emulation: .* too narrow"),
        ({"alibi_slopes": torch.ones(4, dtype=torch.float16)}, "ALiBi slopes must have dtype fp32"),
        ({"num_splits": 129}, "num_splits > 128 not supported"),
        (flash_inputs(page=16), "Paged KV cache block size must be divisible by 256"),
        (flash_inputs(dtype=torch.float32), "only support fp16 and bf16"),
        ({"k_cache": flash_inputs()["k_cache"].bfloat16()}, "query and key must have the same dtype"),
    ],
)
def test_what_flash_attn_checks(changes, text):
    with pytest.raises(RuntimeError, match=text):
        load_interface(FA2).flash_attn_with_kvcache(**flash_inputs() | changes)


def test_flash_attn_says_plus_infinity_for_rows_without_keys():
    given = flash_inputs() | {"cache_seqlens": torch.tensor([0, 300], dtype=torch.int32)}
    out, lse = load_interface(FA2).flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert not out[0].any()
    assert (lse[0] == torch.inf).all()
    assert torch.isfinite(lse[1]).all()


def test_flash_attns_causal_kernel_shifts_the_sum_under_alibi_and_the_windowed_one_does_not():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    given = flash_inputs() | {"alibi_slopes": slopes, "causal": True, "return_softmax_lse": True}
    out, lse = load_interface(FA2).flash_attn_with_kvcache(**given)
    windowed, whole = load_interface(FA2).flash_attn_with_kvcache(**given, window_size=(511, 0))
    torch.testing.assert_close(out, windowed, atol=1e-3, rtol=1e-2)
    last = torch.tensor(LENGTHS) - 1
    torch.testing.assert_close(lse[..., 0] - whole[..., 0], slopes * last[:, None], atol=1e-3, rtol=1e-4)


def test_flash_attns_grid_follows_the_longest_lengths_it_is_told():
    given = flash_inputs()
    q = given["q"][:, 0].contiguous()
    call = {
        "q": q,
        "k": given["k_cache"],
        "v": given["v_cache"],
        "block_table": given["block_table"],
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 305], dtype=torch.int32),
        "causal": True,
    }
    with torch.no_grad():
        load_interface(FA2).flash_attn_varlen_func(**call, max_seqlen_q=1, max_seqlen_k=300)
        with pytest.raises(RuntimeError, match="max_seqlen_k is too small"):
            load_interface(FA2).flash_attn_varlen_func(**call, max_seqlen_q=1, max_seqlen_k=299)


def test_the_private_copy_of_flash_attn_leaves_nothing_behind():
    code = """
import sys
from kvcore_flash_attn.declaration import FlashAttnBackendSpec, FlashAttnOptions
before = set(sys.modules)
made = FlashAttnBackendSpec.create("cpu", FlashAttnOptions(emulate=True))
assert "emulation" in made.library.shown, made.library.shown
print(sorted(n for n in set(sys.modules) - before if n.split(".")[0] in ("flash_attn", "flash_attn_2_cuda")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_emulation_beside_the_real_flash_attn_is_refused(monkeypatch):
    load_interface.cache_clear()
    monkeypatch.setitem(sys.modules, FA2.module, object())
    with pytest.raises(BackendUnavailableError, match="a new process"):
        load_interface(FA2)


def tables():
    """Pages of 16: three sequences of 5, 30 and 61 tokens."""
    return {
        "indptr": torch.tensor([0, 1, 3, 7], dtype=torch.int32),
        "indices": torch.tensor([9, 3, 11, 5, 8, 2, 7], dtype=torch.int32),
        "last_page_len": torch.tensor([5, 14, 13], dtype=torch.int32),
    }


def wrapper(cls, **options):
    with active():
        return cls(torch.zeros(1 << 20, dtype=torch.uint8), "NHD", backend="fa2", **options)


def planned(made, given, heads=4, **facts):
    facts = {"num_qo_heads": heads, "num_kv_heads": 2, "head_dim": 64, "page_size": 16} | facts
    with active():
        made.plan(**given, **facts, q_data_type=torch.float16, kv_data_type=torch.float16)
    return made


def cache():
    torch.manual_seed(0)
    return tuple(torch.randn(2, 16, 16, 2, 64).half())


def test_sinks_are_silently_ignored_by_flashinfer():
    """Why they are refused here: `run` takes them, and nothing changes."""
    for cores in (True, False):
        made = planned(wrapper(flashinfer.BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores=cores), tables())
        q, kv = torch.randn(3, 4, 64).half(), cache()
        assert torch.equal(made.run(q, kv), made.run(q, kv, sinks=torch.full((4,), 50.0)))


def test_what_flashinfer_checks_and_what_it_only_reads():
    made = wrapper(flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    with pytest.raises(RuntimeError, match="Inconsistency of Tensor type"):
        planned(made, tables() | {"indptr": tables()["indptr"].long()})
    with pytest.raises(RuntimeError, match="Unsupported group_size: 5"):
        planned(made, tables(), heads=10)
    planned(made, tables())
    with pytest.raises(ValueError, match="does not match the q_data_type"):
        made.run(torch.randn(3, 4, 64).bfloat16(), cache())
    k, v = cache()
    with pytest.raises(RuntimeError, match="strides differs"):
        made.run(torch.randn(3, 4, 64).half(), (k, v.transpose(1, 2).contiguous().transpose(1, 2)))
    planned(made, tables() | {"last_page_len": torch.tensor([5, 14, 17], dtype=torch.int32)})
    with pytest.raises(RuntimeError, match="emulation: last_page_len"):
        made.run(torch.randn(3, 4, 64).half(), cache())


def test_int64_tables_pass_flashinfers_prefill_unseen_and_the_emulation_stops_them():
    made = wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    given = tables()
    names = dict(zip(given, ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), strict=True))
    call = {names[n]: t for n, t in given.items()} | {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "page_size": 16,
        "causal": True,
        "q_data_type": torch.float16,
    }
    with active(), pytest.raises(RuntimeError, match=r"emulation: qo_indptr is torch\.int64"):
        made.plan(qo_indptr=torch.tensor([0, 1, 3, 6]), **call)


def test_flashinfer_is_as_it_was_afterwards():
    names = ("torch", "get_batch_decode_module", "get_batch_prefill_module", "gen_batch_decode_module")
    before = [getattr(decode, n) for n in names] + [prefill.torch, prefill.get_batch_prefill_module]
    sizes = [decode.get_batch_decode_module.cache_info(), prefill.get_batch_prefill_module.cache_info()]
    planned(wrapper(flashinfer.BatchDecodeWithPagedKVCacheWrapper), tables())
    after = [getattr(decode, n) for n in names] + [prefill.torch, prefill.get_batch_prefill_module]
    assert [a is b for a, b in zip(before, after, strict=True)] == [True] * len(after)
    assert decode.torch is torch
    # Emulated modules never lie where the library looks for its own.
    assert [decode.get_batch_decode_module.cache_info(), prefill.get_batch_prefill_module.cache_info()] == sizes


def test_flashinfers_own_files_go_to_kvcores_folder_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    name = "FLASHINFER_WORKSPACE_BASE"
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    with library._own_workspace():
        assert os.environ[name] == str(tmp_path / "flashinfer")
    assert name not in os.environ
    monkeypatch.setenv(name, "elsewhere")
    with library._own_workspace():
        assert os.environ[name] == "elsewhere"
    assert os.environ[name] == "elsewhere"


def test_emulation_is_named_on_what_is_loaded():
    assert "emulation" in load(FlashInferOptions(emulate=True)).shown
    assert set(KEYWORDS) == {"BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"}


@pytest.mark.parametrize("variant", ["fa3", "fa4"])
def test_other_variants_are_refused_by_name(variant):
    with pytest.raises(NotBuiltError, match=f"FlashAttention {variant[-1]}"):
        FlashAttnOptions(variant=variant)
    with pytest.raises(ConfigError, match="variant"):
        FlashAttnOptions(variant="fa5")


@pytest.mark.parametrize(
    "options", [{"layout": "kv_first"}, {"decode": "fast"}, {"workspace_bytes": 1000}, {"workspace_bytes": True}]
)
def test_bad_options_of_flashinfer(options):
    with pytest.raises(ConfigError, match=rf"backends\.flashinfer\.{next(iter(options))}"):
        FlashInferOptions(**options)


def test_layouts_that_were_not_offered_are_refused():
    """A caller that binds another layout gets an error, and no wrong numbers."""
    from kvcore_flash_attn.declaration import FlashAttnBackendSpec

    from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd

    class Careless(FlashAttnBackendSpec):
        @classmethod
        def layouts(cls, spec, facts, options):
            return [LayoutOption(hnd(spec.content), KernelBlocks(multiple_of=8))]

    (result,) = run(Careless, [case("careless", "decode", 256)])
    assert result.outcome == "failed"
    assert "cannot read layout hnd" in result.reason
