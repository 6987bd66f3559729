"""A stand-in for vLLM's three CPU operators, for machines without the wheel. It proves calls, and no kernel.

Registered under the schemas that the wheel told of itself, so that names and types of arguments are torch's to
check. It takes memory as the compiled operators do: addresses, the strides that they read and no others; whole
passes of 16 or 32 keys are multiplied before the mask; fp8 is cut; sequences without keys are left alone. What
would leave a tensor's memory there is an error here.
"""

import json
from functools import cache
from pathlib import Path

import torch
from kvcore_vllm_cpu.backend import VllmCpuBackend
from kvcore_vllm_cpu.declaration import VllmCpuBackendSpec
from kvcore_vllm_cpu.library import Library, bind

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "vllm_cpu_operators.json").read_text())
NAME = "kvcore_stand_in_for_vllm_cpu"
PASS = {"vec": 32, "vec16": 16}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class StandInSpec(VllmCpuBackendSpec):
    """The backend's own declaration, over the stand-in."""

    @classmethod
    def unavailable(cls, options):
        return None

    @classmethod
    def create(cls, device, options):
        return VllmCpuBackend(load(), options)

    @classmethod
    def proof(cls, options, facts):
        return "emulated"


@cache
def load() -> Library:
    """The stand-in, bound as the wheel's operators are."""
    define(NAME, RECORDED["schemas"])
    return bind(getattr(torch.ops, NAME), f"a stand-in for {RECORDED['version']}")


@cache
def _kept() -> list[torch.library.Library]:
    """Registrations live as long as their library object."""
    return []


def define(namespace, schemas):
    """Operators of a new namespace under these schemas."""
    library = torch.library.Library(namespace, "DEF")
    _kept().append(library)
    for schema in schemas:
        library.define(schema)
        name = schema.partition("(")[0]
        if name in globals():
            library.impl(name, globals()[name], "CPU")


def flat(tensor, dtype, count):
    """`count` elements from the tensor's address on, whatever its strides are."""
    if tensor.dtype != dtype:
        raise RuntimeError(f"expected {dtype}, found {tensor.dtype}")
    return tensor.as_strided((count,), (1,))


def get_scheduler_metadata(
    num_req,
    num_heads_q,
    num_heads_kv,
    head_dim,
    seq_lens,
    dtype,
    query_start_loc,
    casual,
    window_size,
    isa_hint,
    enable_kv_split,
    dynamic_causal,
    kv_cache_dtype="auto",
):
    if isa_hint not in PASS or (kv_cache_dtype != "auto" and isa_hint != "vec"):
        raise RuntimeError(f"Unsupported CPU attention configuration: {isa_hint} {kv_cache_dtype}")
    flat(seq_lens, torch.int32, num_req)
    flat(query_start_loc, torch.int32, num_req + 1)
    planned = (PASS[isa_hint], num_req, num_heads_q, num_heads_kv, head_dim, int(casual), window_size)
    return torch.tensor(planned, dtype=torch.int64).view(torch.int8)


def cpu_attn_reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
):
    tokens, heads, dim = key.shape
    size = key_cache.shape[2]
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise RuntimeError("Expected stride(2) == 1")
    if kv_cache_dtype == "auto" and not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        raise MemoryError("the compiled operator writes past the block here")
    if (heads, dim) != (key_cache.shape[1], key_cache.shape[3]) or value.shape != key.shape:
        raise MemoryError("the compiled operator writes past the heads here")
    k_NKDP = key_cache.as_strided((len(key_cache), heads, dim, size), (*key_cache.stride()[:2], size, 1))
    v_NKPD = value_cache.as_strided((len(key_cache), heads, size, dim), (*key_cache.stride()[:2], dim, 1))
    for t, slot in enumerate(flat(slot_mapping, torch.int64, tokens).tolist()):
        if slot >= 0:
            k_NKDP[slot // size, :, :, slot % size] = _cut(key[t], k_scale, kv_cache_dtype)
            v_NKPD[slot // size, :, slot % size] = _cut(value[t], v_scale, kv_cache_dtype)


def _cut(values, scale, stored):
    """Towards zero, as the compiled operator cuts mantissas: the nearest code, or the one before it."""
    if stored == "auto":
        return values
    top = torch.finfo(FP8[stored]).max
    wide = (values.float() / scale).clamp(-top, top)
    codes = wide.to(FP8[stored])
    return codes.view(torch.uint8) - (codes.float().abs() > wide.abs()).to(torch.uint8)


def cpu_attention_with_kv_cache(
    query,
    key_cache,
    value_cache,
    output,
    query_start_loc,
    seq_lens,
    scale,
    causal,
    alibi_slopes,
    sliding_window_size,
    block_table,
    softcap,
    scheduler_metadata,
    s_aux,
    dynamic_causal,
    k_scale=1.0,
    v_scale=1.0,
    kv_cache_dtype="auto",
):
    at_once, seqs, heads, kv_heads, dim, casual, window = scheduler_metadata.view(torch.int64).tolist()
    tokens, size = len(query), key_cache.shape[2]
    planned = (heads, kv_heads, dim, bool(casual), window)
    if planned != (query.shape[1], key_cache.shape[1], query.shape[2], causal, sliding_window_size):
        raise MemoryError("the compiled operator runs another step than was planned")
    if query.stride(2) != 1 or size % at_once:
        raise RuntimeError("Expected stride(2) == 1 and whole passes in a block")
    if s_aux is not None and s_aux.numel() < heads + 15:
        raise MemoryError("the compiled operator loads 16 sinks at a time")
    if (kv_cache_dtype == "auto" and query.dtype != key_cache.dtype) or query.dtype != output.dtype:
        raise MemoryError("the compiled operator takes one dtype for the other here")
    strides = key_cache.stride()[:2]
    k_NKDP = key_cache.as_strided((len(key_cache), kv_heads, dim, size), (*strides, size, 1))
    v_NKPD = value_cache.as_strided((len(key_cache), kv_heads, size, dim), (*strides, dim, 1))
    starts = flat(query_start_loc, torch.int32, seqs + 1).tolist()
    lengths = flat(seq_lens, torch.int32, seqs).tolist()
    out_THD = output.as_strided((tokens, heads, dim), (heads * dim, dim, 1))
    for s, length in enumerate(lengths):
        if length == 0:
            continue
        columns = -(-length // size)
        ids = block_table.as_strided((seqs, columns), (block_table.stride(0), 1))[s].long()
        end = -(-length // at_once) * at_once
        k_KDn = _read(k_NKDP, ids, kv_cache_dtype, k_scale).permute(1, 2, 0, 3).flatten(2)[:, :, :end]
        v_KnD = _read(v_NKPD, ids, kv_cache_dtype, v_scale).transpose(0, 1).flatten(1, 2)[:, :end]
        rows = slice(starts[s], starts[s + 1])
        i = torch.arange(length - (rows.stop - rows.start), length)[:, None]
        j = torch.arange(end)
        shared = heads // kv_heads
        scores_Hij = torch.einsum("ihd,hdj->hij", query[rows].float(), k_KDn.repeat_interleave(shared, 0)) * scale
        if softcap:
            scores_Hij = softcap * torch.tanh(scores_Hij / softcap)
        if alibi_slopes is not None:
            scores_Hij = scores_Hij + flat(alibi_slopes, torch.float32, heads)[:, None, None] * (j - i)
        hidden_ij = (j >= length) | ((j > i) & causal)
        if window != -1:
            hidden_ij |= (j <= i - window) | (j >= i + window)
        scores_Hij = scores_Hij.masked_fill(hidden_ij, -torch.inf)
        if s_aux is not None:
            sinks = s_aux[:heads, None, None].float().expand(-1, len(i), 1)
            scores_Hij = torch.cat([scores_Hij, sinks], -1)
        weights_Hij = scores_Hij.softmax(-1)[:, :, :end]
        result = torch.einsum("hij,hjd->ihd", weights_Hij, v_KnD.repeat_interleave(shared, 0))
        out_THD[rows] = result.to(output.dtype)


def _read(field, ids, stored, scale):
    picked = field[ids]
    return picked.float() if stored == "auto" else picked.view(FP8[stored]).float() * scale
