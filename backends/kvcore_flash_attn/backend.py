"""The FlashAttention backend: the library's paged functions behind the contract."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.backend import AttentionBackend, AttentionGroup, AttentionLayer, Batch, IntegrityError
from kvcore_flash_attn.library import Library, load
from kvcore_flash_attn.options import FlashAttnOptions
from kvcore_flash_attn.segments import Segment, SegmentPlan, plan_segments


def make_backend(device: str, options: FlashAttnOptions) -> FlashAttnBackend:
    """The backend over the library that `options` name, which is imported and checked here."""
    return FlashAttnBackend(device, load(options))


class FlashAttnBackend(AttentionBackend):
    """Adapter of FlashAttention 2.

    Args:
        device: Torch device.
        library: The library's functions, or their emulation.
    """

    def __init__(self, device: str, library: Library) -> None:
        self.device = torch.device(device)
        self.library = library

    def prepare(self, batch: Batch, group: AttentionGroup) -> SegmentPlan:
        """Segments, tables, lengths and write positions of the step."""
        return plan_segments(batch, group, self.library.page_step)

    def write(
        self,
        layer: AttentionLayer,
        tensors: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: SegmentPlan,
    ) -> None:
        """Through the core: the library writes only where its own decode call does, and skips no token."""
        metadata.writer.write({name: tensors[name] for name in ("k", "v")}, cache)

    def attend(
        self,
        layer: AttentionLayer,
        query: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: SegmentPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Segment by segment; everything is read from the cache."""
        query_THD = _last_contiguous(query["q"])
        _check_layer(layer, query_THD, cache)
        for segment in metadata.segments:
            rows = segment.tokens
            call = self._paged if segment.query_len else self._varlen
            result_tHD, lse_tH = call(layer, query_THD[rows], cache, metadata, segment, lse is not None)
            out[rows].copy_(result_tHD)
            if lse is not None and lse_tH is not None:
                # A row without keys has +inf here, and nothing else has.
                lse[rows].copy_(lse_tH.masked_fill(lse_tH == torch.inf, -torch.inf))

    def _paged(
        self,
        layer: AttentionLayer,
        query_tHD: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        step: SegmentPlan,
        segment: Segment,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = self.library.with_kvcache(
            q=query_tHD.view(segment.count, segment.query_len, *query_tHD.shape[1:]),
            k_cache=cache["k"],
            v_cache=cache["v"],
            cache_seqlens=segment.kv_lens_n,
            block_table=segment.table_nC,
            softmax_scale=layer.query.softmax_scale,
            causal=step.causal,
            window_size=_window(layer, step, segment, want_lse),
            softcap=layer.query.softcap or 0.0,
            alibi_slopes=layer.alibi_slopes,
            return_softmax_lse=want_lse,
        )
        if not want_lse:
            return result.flatten(0, 1), None
        out_nqHD, lse_nHq = result
        return out_nqHD.flatten(0, 1), lse_nHq.transpose(1, 2).flatten(0, 1)

    def _varlen(
        self,
        layer: AttentionLayer,
        query_tHD: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        step: SegmentPlan,
        segment: Segment,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = self.library.varlen(
            q=query_tHD,
            k=cache["k"],
            v=cache["v"],
            cu_seqlens_q=segment.query_starts,
            cu_seqlens_k=segment.key_starts,
            max_seqlen_q=segment.max_query_len,
            max_seqlen_k=segment.max_kv_len,
            softmax_scale=layer.query.softmax_scale,
            causal=step.causal,
            window_size=_window(layer, step, segment, want_lse),
            softcap=layer.query.softcap or 0.0,
            alibi_slopes=layer.alibi_slopes,
            return_attn_probs=want_lse,
            block_table=segment.table_nC,
        )
        if not want_lse:
            return result, None
        out_tHD, lse_Ht, _ = result
        return out_tHD, lse_Ht.transpose(0, 1)


def _window(layer: AttentionLayer, step: SegmentPlan, segment: Segment, want_lse: bool) -> tuple[int, int]:
    """The bounds of the call.

    The library's causal kernel adds ``slope * j`` for ``-slope * (i - j)``: the same weights, another
    log-sum-exp. Its windowed kernel adds the bias itself; a window over all keys chooses that one.
    """
    left, right = step.window
    if not (want_lse and layer.query.alibi and step.causal):
        return left, right
    longest = max(0, segment.width - 1)
    return (longest if left < 0 else min(left, longest)), 0


def _last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_layer(layer: AttentionLayer, query_THD: torch.Tensor, cache: Mapping[str, torch.Tensor]) -> None:
    """What the library would read as something else."""
    heads, slopes = query_THD.shape[1], layer.alibi_slopes
    for name in ("k", "v"):
        if cache[name].dtype != query_THD.dtype:
            raise IntegrityError(
                "queries and cache must have one dtype",
                field=name,
                got=str(cache[name].dtype),
                allowed=str(query_THD.dtype),
            )
    if layer.query.alibi != (slopes is not None):
        raise IntegrityError(
            "the layer's slopes and its facts disagree",
            field="alibi_slopes",
            got="none" if slopes is None else tuple(slopes.shape),
            allowed=f"alibi={layer.query.alibi}",
        )
    if slopes is not None and (slopes.dtype != torch.float32 or tuple(slopes.shape) != (heads,)):
        raise IntegrityError(
            "slopes are float32 [H]",
            field="alibi_slopes",
            got=f"{slopes.dtype} {tuple(slopes.shape)}",
            allowed=f"float32 ({heads},)",
        )
