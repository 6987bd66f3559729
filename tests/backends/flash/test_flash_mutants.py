"""Planted faults in the adapters: each is killed by the conformance kit over the emulation."""

from dataclasses import replace

import kvcore_flash_attn.backend as fa_backend
import kvcore_flash_attn.segments as fa_step
import kvcore_flashinfer.backend as fi_backend
import kvcore_flashinfer.declaration as fi_spec
import kvcore_flashinfer.planner as fi_step
import pytest
import torch
from backends.flash.flash_cases import case
from kvcore_flash_attn.declaration import FlashAttnBackendSpec
from kvcore_flashinfer.declaration import FlashInferBackendSpec

from kvcore.attention.query import Mask
from kvcore.testing import Case, Seq, run

MIXED = (Seq(20, 1), Seq(37, 1), Seq(0, 5), Seq(15, 4))
SPECS = {"flash_attn": FlashAttnBackendSpec, "flashinfer": FlashInferBackendSpec}
PAGE = {"flash_attn": 256, "flashinfer": 16}


def longer(page):
    return (Seq(2 * page + 3, 1), Seq(page + 1, 1), Seq(page + 9, 4))


# -- the mutations ---------------------------------------------------------------------------------------


def swap_swapped(m, backend):
    """Keys for values and values for keys."""
    cls = fa_backend.FlashAttnBackend if backend == "flash_attn" else fi_backend.FlashInferBackend
    real = cls.attend

    def attend(self, layer, query, cache, metadata, out, lse=None):
        real(self, layer, query, {"k": cache["v"], "v": cache["k"]}, metadata, out, lse)

    m.setattr(cls, "attend", attend)


def stale_plan(m, backend):
    """The first step's metadata for ever."""
    cls = fa_backend.FlashAttnBackend if backend == "flash_attn" else fi_backend.FlashInferBackend
    real, kept = cls.prepare, {}

    def prepare(self, batch, group):
        first = kept.setdefault(group.kv_group, real(self, batch, group))
        return replace(first, writer=real(self, batch, group).writer) if backend == "flash_attn" else first

    m.setattr(cls, "prepare", prepare)


def fa_window(m, backend):
    m.setattr(Mask, "keys_before", property(lambda mask: mask.window))


def fi_window(m, backend):
    real = fi_step.Planner._facts

    def facts(self, group):
        found = real(self, group)
        return found | {"window_left": group.query.mask.window or -1}

    m.setattr(fi_step.Planner, "_facts", facts)


def segments(m, change):
    real = fa_step._segment
    m.setattr(fa_step, "_segment", lambda *given: change(real(*given)))


def tables(m, change):
    real = fi_step.page_table
    m.setattr(fi_step, "page_table", lambda *given: change(real(*given)))


def fa_page_order(m, backend):
    segments(m, lambda s: replace(s, table_nC=s.table_nC.flip(1).contiguous()))


def fi_page_order(m, backend):
    tables(m, lambda t: replace(t, indices=t.indices.flip(0)))


def fa_last_page(m, backend):
    """Lengths rounded up to whole pages."""
    segments(m, lambda s: replace(s, kv_lens_n=(s.kv_lens_n + 255) // 256 * 256))


def fi_last_page_full(m, backend):
    tables(m, lambda t: replace(t, last_page_len=torch.full_like(t.last_page_len, 16)))


def fi_last_page_counts_from_zero(m, backend):
    tables(m, lambda t: replace(t, last_page_len=t.last_page_len - 1))


def fa_int64(m, backend):
    segments(m, lambda s: replace(s, table_nC=s.table_nC.long(), kv_lens_n=s.kv_lens_n.long()))


def fi_int64(m, backend):
    tables(m, lambda t: replace(t, indptr=t.indptr.long(), indices=t.indices.long()))


def fa_lse_of_empty_rows(m, backend):
    real = torch.Tensor.masked_fill
    m.setattr(
        torch.Tensor,
        "masked_fill",
        lambda t, mask, value: (
            t if value == -torch.inf and t.dtype == torch.float32 and t.dim() == 2 else real(t, mask, value)
        ),
    )


def fa_lse_of_alibi(m, backend):
    m.setattr(fa_backend, "_window", lambda layer, step, segment, want_lse: step.window)


def fa_lse_axes(m, backend):
    """[n, H, Q] read as [n, Q, H]."""
    real = fa_backend.FlashAttnBackend._paged

    def paged(self, layer, q, cache, step, segment, want_lse):
        out, lse = real(self, layer, q, cache, step, segment, want_lse)
        mixed = lse.view(segment.count, segment.query_len, -1).transpose(1, 2).reshape(lse.shape)
        return out, mixed.flip(1)

    m.setattr(fa_backend.FlashAttnBackend, "_paged", paged)


def fi_lse_base(m, backend):
    m.setattr(fi_backend, "LN_2", 1.0)


def fi_group_5(m, backend):
    m.setattr(fi_step, "use_tensor_cores", lambda query, options: False)


def fi_value_scale(m, backend):
    m.setattr(fi_backend.Scales, "of", lambda self, layer: (float(layer.k_scale), 1.0))


def fi_scales_kept(m, backend):
    """The keys' scale multiplied into the codes, and not taken out again."""
    m.setattr(fi_backend.Scales, "of", lambda self, layer: (1.0, 1.0))


def fi_noncausal(m, backend):
    """Prefill that sees the future."""
    real = fi_step.Planner._facts
    m.setattr(fi_step.Planner, "_prefill", _without_mask(fi_step.Planner._prefill))
    assert real is fi_step.Planner._facts


def _without_mask(real):
    def prefill(self, batch, part, group, order, first):
        mask = replace(group.query.mask, causal=False)
        return real(self, batch, part, replace(group, query=replace(group.query, mask=mask)), order, first)

    return prefill


def fa_noncausal(m, backend):
    real = fa_backend.plan_segments
    m.setattr(fa_backend, "plan_segments", lambda *given: replace(real(*given), causal=False))


MUTANTS = {
    ("flash_attn", "K and V swapped"): (swap_swapped, {}),
    ("flashinfer", "K and V swapped"): (swap_swapped, {}),
    ("flash_attn", "stale plan"): (stale_plan, {"check": "steps"}),
    ("flashinfer", "stale plan"): (stale_plan, {"check": "steps"}),
    ("flash_attn", "window convention"): (fa_window, {"window": 7}),
    ("flashinfer", "window convention"): (fi_window, {"window": 7}),
    ("flash_attn", "page order"): (fa_page_order, {}),
    ("flashinfer", "page order"): (fi_page_order, {}),
    ("flash_attn", "last page length"): (fa_last_page, {}),
    ("flashinfer", "last page full"): (fi_last_page_full, {}),
    ("flashinfer", "last page short"): (fi_last_page_counts_from_zero, {}),
    ("flash_attn", "int64 indices"): (fa_int64, {}),
    ("flashinfer", "int64 indices"): (fi_int64, {}),
    ("flash_attn", "log-sum-exp of empty rows"): (fa_lse_of_empty_rows, {"check": "padded", "lse": True}),
    ("flash_attn", "log-sum-exp under ALiBi"): (fa_lse_of_alibi, {"alibi": True, "lse": True}),
    ("flash_attn", "log-sum-exp axes"): (fa_lse_axes, {"lse": True}),
    ("flashinfer", "log-sum-exp base"): (fi_lse_base, {"lse": True}),
    ("flashinfer", "group of 5 on CUDA cores"): (fi_group_5, {"gqa": 5, "num_kv_heads": 1}),
    ("flashinfer", "scale of values"): (
        fi_value_scale,
        {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.5, "v_scale": 2.0},
    ),
    ("flashinfer", "scales left out"): (
        fi_scales_kept,
        {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.5, "v_scale": 1.0},
    ),
    ("flash_attn", "no causal mask"): (fa_noncausal, {}),
    ("flashinfer", "no causal mask"): (fi_noncausal, {}),
}


def killer(backend, changes) -> Case:
    changes = dict(changes)
    check = changes.pop("check", "attend")
    page = PAGE[backend]
    seqs = {"padded": (Seq(page + 3, 1), Seq(5, 1))}.get(check, longer(page))
    made = case("mutant", "mixed", page, seqs=seqs, **changes)
    return replace(made, id=f"L3.{check}.mutant", level="L3", check=check)


@pytest.mark.parametrize("key", MUTANTS, ids=lambda key: f"{key[0]}: {key[1]}")
def test_the_kit_kills_it(key, monkeypatch):
    backend, _ = key
    mutate, changes = MUTANTS[key]
    chosen = killer(backend, changes)
    (sound,) = run(SPECS[backend], [chosen])
    assert (sound.outcome, sound.reason) == ("passed", None)
    with monkeypatch.context() as m:
        mutate(m, backend)
        (result,) = run(SPECS[backend], [chosen])
    assert result.outcome == "failed", "the mutant lives"
    (sound,) = run(SPECS[backend], [chosen])
    assert sound.outcome == "passed"


def test_the_group_sizes_are_why_group_5_goes_to_tensor_cores():
    assert 5 not in fi_spec.CUDA_CORE_GROUPS
