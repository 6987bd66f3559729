"""The FlashInfer backend: the library's paged wrappers behind the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kvcore.backend import AttentionBackend, AttentionGroup, AttentionLayer, Batch, IntegrityError
from kvcore_flashinfer.library import Library, load
from kvcore_flashinfer.options import FlashInferOptions
from kvcore_flashinfer.planner import Planner, WrapperCall, WrapperPlan
from kvcore_flashinfer.quant import Scales, encode

LN_2 = math.log(2.0)


def make_backend(device: str, options: FlashInferOptions) -> FlashInferBackend:
    """The backend over the installed library, which is imported and checked here."""
    return FlashInferBackend(device, load(options), options)


class FlashInferBackend(AttentionBackend):
    """Adapter of FlashInfer's wrappers.

    Args:
        device: Torch device.
        library: The wrapper classes, over the real kernels or their emulation.
        options: Options of the backend.
    """

    def __init__(self, device: str, library: Library, options: FlashInferOptions) -> None:
        self.device = torch.device(device)
        self.library = library
        self.planner = Planner(library, options, self.device)
        self.scales = Scales()

    def prepare(self, batch: Batch, group: AttentionGroup) -> WrapperPlan:
        """Plans the group's wrappers for the step."""
        return self.planner.plan(batch, group)

    def write(
        self,
        layer: AttentionLayer,
        tensors: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: WrapperPlan,
    ) -> None:
        """Through the core.

        The library's own append skips no token, converts no dtype and checks neither; its positions would
        have to be computed by a kernel from what the slot mapping says already.
        """
        values = {name: tensors[name] for name in ("k", "v")}
        if layer.query.quant is not None:
            values = encode(layer, values, cache)
        metadata.writer.write(values, cache)

    def attend(
        self,
        layer: AttentionLayer,
        query: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: WrapperPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Runs the planned wrappers; everything is read from the cache."""
        query_THD = query["q"]
        if query_THD.stride(-1) != 1:
            query_THD = query_THD.contiguous()
        _check_cache(cache)
        for part in metadata.calls:
            rows = part.tokens
            self._run(layer, query_THD[rows], cache, part, out[rows], None if lse is None else lse[rows])

    def _run(
        self,
        layer: AttentionLayer,
        query_tHD: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        part: WrapperCall,
        out_tHD: torch.Tensor,
        lse_tH: torch.Tensor | None,
    ) -> None:
        k_scale, v_scale = self.scales.of(layer)
        # The kernels write through a pointer, as if outputs were contiguous.
        target = out_tHD if out_tHD.is_contiguous() else torch.empty_like(out_tHD).contiguous()
        sums = None if lse_tH is None else torch.empty(lse_tH.shape, device=lse_tH.device)
        part.wrapper.run(
            q=query_tHD,
            paged_kv_cache=(cache["k"], cache["v"]),
            k_scale=None if k_scale == 1.0 else k_scale,
            v_scale=None if v_scale == 1.0 else v_scale,
            out=target,
            lse=sums,
            return_lse=sums is not None,
        )
        if part.empty_t is not None:
            target.index_fill_(0, part.empty_t, 0)
        if target is not out_tHD:
            out_tHD.copy_(target)
        if lse_tH is not None and sums is not None:
            # The library's is to base 2.
            torch.mul(sums, LN_2, out=lse_tH)
            if part.empty_t is not None:
                lse_tH.index_fill_(0, part.empty_t, -torch.inf)


def _check_cache(cache: Mapping[str, torch.Tensor]) -> None:
    """What the library checks in one wrapper and not in the other."""
    k, v = cache["k"], cache["v"]
    if k.stride() != v.stride() or k.dtype != v.dtype:
        raise IntegrityError(
            "keys and values must lie alike",
            field="cache",
            got=f"{k.dtype} {k.stride()} and {v.dtype} {v.stride()}",
            allowed="equal dtypes and strides",
        )
