"""The vllm_cpu backend: vLLM's write and attention operators behind the contract."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.backend import AttentionBackend, AttentionGroup, AttentionLayer, Batch, IntegrityError, dtype, torch_dtype
from kvcore_vllm_cpu.library import Library, load
from kvcore_vllm_cpu.options import VllmCpuOptions
from kvcore_vllm_cpu.work_list import WorkList, plan_work

Tensors = Mapping[str, torch.Tensor]
# The library loads 16 sinks at a time, past the end of a shorter tensor.
SINKS_AT_ONCE = 16


def make_backend(device: str, options: VllmCpuOptions) -> VllmCpuBackend:
    """The backend over the installed library, which is loaded and checked here."""
    return VllmCpuBackend(load(), options)


class VllmCpuBackend(AttentionBackend):
    """Adapter of vLLM's CPU kernels. The library compares no dtypes and few shapes: we do, before every call.

    Args:
        library: Its operators.
        options: Which variant of the kernel.
    """

    def __init__(self, library: Library, options: VllmCpuOptions) -> None:
        self.library = library
        self.options = options

    def prepare(self, batch: Batch, group: AttentionGroup) -> WorkList:
        """The library's work list."""
        return plan_work(batch, group, self.library, self.options.isa_for(group.query.head_dim))

    def write(self, layer: AttentionLayer, tensors: Tensors, cache: Tensors, metadata: WorkList) -> None:
        """By the library; codes of fp8 through the core, because the library cuts where it should round."""
        tokens = len(metadata.part.slot_mapping_T)
        given = {name: tensors[name][:tokens] for name in ("k", "v")}
        for name, values in given.items():
            _check_shape(name, values, tokens, layer.query.num_kv_heads, layer.query.head_dim)
        if layer.query.quant is not None:
            codes = {name: _codes(layer, name, values) for name, values in given.items()}
            metadata.writer.write(codes, cache)
            return
        _check_dtypes(layer, {**given, "k cache": cache["k"], "v cache": cache["v"]})
        key_cache, value_cache = _as_the_library_reads(cache)
        self.library.write(
            key=_last_contiguous(given["k"]),
            value=_last_contiguous(given["v"]),
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=metadata.part.slot_mapping_T,
            isa=metadata.isa,
        )

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensors,
        cache: Tensors,
        metadata: WorkList,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """One call for the whole step; everything is read from the cache."""
        facts, query_THD = layer.query, query["q"]
        _check_shape("q", query_THD, metadata.queries, facts.num_heads, facts.head_dim)
        _check_shape("out", out, metadata.queries, facts.num_heads, facts.head_dim)
        plain = {} if facts.quant is not None else {"k cache": cache["k"], "v cache": cache["v"]}
        _check_dtypes(layer, {"q": query_THD, "out": out, **plain})
        key_cache, value_cache = _as_the_library_reads(cache)
        # The library writes rows one after the other, whatever the strides are.
        result = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self.library.attend(
            query=_last_contiguous(query_THD),
            key_cache=key_cache,
            value_cache=value_cache,
            output=result,
            query_start_loc=metadata.starts,
            seq_lens=metadata.part.kv_lens,
            scale=facts.softmax_scale,
            causal=facts.mask.causal,
            alibi_slopes=layer.alibi_slopes,
            sliding_window_size=metadata.window,
            block_table=metadata.part.block_table_SN,
            softcap=facts.softcap or 0.0,
            scheduler_metadata=metadata.work,
            s_aux=_padded(layer.sinks),
            dynamic_causal=None,
            k_scale=_scale(layer.k_scale),
            v_scale=_scale(layer.v_scale),
            kv_cache_dtype=metadata.stored,
        )
        if metadata.empty is not None:
            result[metadata.empty] = 0
        if result is not out:
            out.copy_(result)


def _as_the_library_reads(cache: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as [N, K, P, D]: of the strides it takes blocks and heads, those of keys for values as well."""
    found = cache["k"].transpose(2, 3), cache["v"]
    return found if found[0].itemsize > 1 else (found[0].view(torch.uint8), found[1].view(torch.uint8))


def _codes(layer: AttentionLayer, name: str, values: torch.Tensor) -> torch.Tensor:
    """Codes of the cache's fp8: value over scale, at most the largest finite one, rounded half to even."""
    top = dtype(layer.query.cache_dtype).largest
    scaled = values.float() / _scale(layer.k_scale if name == "k" else layer.v_scale)
    return scaled.clamp(-top, top).to(torch_dtype(layer.query.cache_dtype))


def _scale(scale: torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


def _padded(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else torch.nn.functional.pad(sinks, (0, SINKS_AT_ONCE - 1))


def _last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_dtypes(layer: AttentionLayer, tensors: Tensors) -> None:
    wanted = torch_dtype(layer.query.dtype)
    for name, tensor in tensors.items():
        if tensor.dtype != wanted:
            raise IntegrityError(
                "the library would take one dtype for the other and leave the block",
                field=name,
                got=str(tensor.dtype),
                allowed=str(wanted),
            )


def _check_shape(name: str, tensor: torch.Tensor, rows: int, heads: int, dim: int) -> None:
    if len(tensor) < rows or tuple(tensor.shape[1:]) != (heads, dim):
        raise IntegrityError(
            "the library would read or write outside of the tensor",
            field=name,
            got=tuple(tensor.shape),
            allowed=f"({rows} or more, {heads}, {dim})",
        )
