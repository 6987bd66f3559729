"""The axes of the kit and their values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.testing.cases.case import Base, Seq

PHASES = ("prefill", "chunked", "decode", "multi_token", "mixed", "prefix_hit")
SCALES = (0.3, 1.0, 7.0)
# DeepSeek-V2 and V3 (arXiv 2405.04434, section 3.1.2): kv_lora_rank 512, qk_rope_head_dim 64; few heads.
LATENT: Mapping[str, Any] = {
    "stores": "latent",
    "num_kv_heads": 1,
    "gqa": 16,
    "head_dim": 576,
    "head_dim_v": 512,
    "scale": 192**-0.5,
}
# Every dtype, and every granularity of scales.
QUANTIZED: Mapping[str, dict[str, Any]] = {
    "int8_token_head": {"cache_dtype": "int8", "quant": "token_head"},
    "fp8_e4m3_tensor": {"cache_dtype": "fp8_e4m3", "quant": "tensor"},
    "fp8_e5m2_head": {"cache_dtype": "fp8_e5m2", "quant": "head"},
    "fp8_e4m3_token_head": {"cache_dtype": "fp8_e4m3", "quant": "token_head"},
}
# Features that must not disturb one another.
COMBINED: Mapping[str, dict[str, Any]] = {
    "window+sinks": {"window": 5, "sinks": True},
    "softcap+alibi": {"softcap": 1.5, "alibi": True},
    "softcap+sinks+scale": {"softcap": 1.5, "sinks": True, "scale": 0.3},
    "everything": {"window": 9, "softcap": 2.0, "alibi": True, "sinks": True, "scale": 0.25, "gqa": 3},
}
# Sweeps of level full alone, and those whose values are all asked in every phase at level quick: kernels for decode and
# for prefill each have their own last block.
AT_FULL = ("odd_head_dim",)
BOTH_WAYS = ("block_size",)
Sweep = dict[str, tuple[dict[str, Any], Sequence[str]]]


def sequences(phase: str, p: int) -> tuple[Seq, ...]:
    """The step of a phase for blocks of `p` tokens: lengths on, before and after the edges of blocks."""
    shapes = {
        "prefill": ((0, 1), (0, p), (0, 2 * p + 3)),
        "chunked": ((p, p), (p + 3, p + 2), (2 * p, 3)),
        "decode": ((p, 1), (2 * p + 1, 1), (3 * p - 1, 1), (3, 1)),
        "multi_token": ((2 * p - 1, 4), (p, 3), (1, 2)),
        "mixed": ((p, 1), (3 * p + 2, 1), (0, p + 3), (p + 1, p)),
        "prefix_hit": ((2 * p, 3), (2 * p, p + 1, 2 * p)),
        "one_decode": ((2 * p + 3, 1),),
        "one_prefill": ((0, 2 * p + 3),),
    }
    return tuple(Seq(*s) for s in shapes[phase])


def windows(p: int) -> dict[str, int]:
    """Windows by name for blocks of `p` tokens."""
    return {"1": 1, "P-1": max(1, p - 1), "P": p, "P+1": p + 1, "long": 100 * p}


def sweeps(base: Base) -> dict[str, Sweep]:
    """Per axis and value: what it changes, and the phases that can show it."""
    p, d = base.block_size, base.head_dim
    longer = ("chunked", "decode", "multi_token", "mixed")
    several = ("prefill", "chunked", "mixed")
    gqa: Sweep = {str(g): ({"gqa": g}, PHASES) for g in (1, 3, 4, 8)}
    gqa["all"] = ({"num_kv_heads": 1, "gqa": 8}, PHASES)
    chunks: Sweep = {name: ({"chunk": n}, longer) for name, n in (("P", p), ("P+3", p + 3), ("2P", 2 * p))}
    chunks["P+3.tail"] = ({"chunk": p + 3, "own_retention": True}, longer)
    dims = [n for n in (32, 64, 72, 80, 96, 120, 128, 192, 256, 320) if n != d]
    # Every remainder of 16, for kernels that pack or pad.
    odd = [n for n in range(65, 80) if n not in dims]
    return {
        "gqa": gqa,
        "head_dim": {str(n): ({"head_dim": n}, ("decode", "mixed")) for n in dims},
        "odd_head_dim": {str(n): ({"head_dim": n}, ("mixed",)) for n in odd},
        "head_dim_v": {
            f"{a}x{b}": ({"head_dim": a, "head_dim_v": b}, ("decode", "mixed"))
            for a, b in ((2 * d, d), (d, 2 * d), (192, 128))
        },
        # 3P is no power of two.
        "block_size": {
            name: ({"block_size": n}, ("mixed", "decode"))
            for name, n in (("4", 4), ("16", 16), ("32", 32), ("64", 64), ("128", 128), ("3P", 3 * p))
            if n != p
        },
        "kernel_ratio": {str(r): ({"kernel_ratio": r}, ("decode", "mixed", "prefix_hit")) for r in (2, 4)},
        "chunk": chunks,
        "mask": {
            "bidirectional": ({"causal": False, "profile": "encoder"}, several),
            "bidirectional+window": ({"causal": False, "window": 4}, several),
            "bidirectional+alibi": ({"causal": False, "alibi": True}, several),
        },
        "scale": {"0.3": ({"scale": 0.3}, PHASES), "0.05": ({"scale": 0.05}, PHASES)},
        "softcap": {"1.5": ({"softcap": 1.5}, PHASES)},
        "alibi": {"true": ({"alibi": True}, PHASES)},
        "sinks": {"true": ({"sinks": True}, PHASES)},
        "dtype": {
            n: ({"dtype": n}, ("mixed", "decode"))
            for n in ("float32", "float16", "bfloat16", "float64")
            if n != base.dtype
        },
        "cache_dtype": {
            n: ({"cache_dtype": n}, ("mixed",)) for n in ("float16", "bfloat16", "float32") if n != base.dtype
        },
    }


def pair_axes(base: Base) -> dict[str, list[dict[str, Any]]]:
    """The values that meet pair by pair."""
    p, d = base.block_size, base.head_dim
    return {
        "phase": [{"phase": n} for n in ("decode", "mixed", "chunked", "multi_token")],
        "gqa": [{}, {"gqa": 1}, {"gqa": 3}, {"num_kv_heads": 1, "gqa": 8}],
        "dim": [{}, {"head_dim": 64}, {"head_dim": 128}, {"head_dim": 2 * d, "head_dim_v": d}],
        "ratio": [{}, {"kernel_ratio": 2}, {"kernel_ratio": 4}],
        "mask": [{}, {"window": p}, {"window": p + 1, "own_retention": True}, {"chunk": p + 3}],
        "sinks": [{}, {"sinks": True}],
        "softcap": [{}, {"softcap": 1.5}],
        "alibi": [{}, {"alibi": True}],
        "placement": [{}, {"placement": "packed", "layers": 2}],
        "dtype": [{}, {"dtype": "float16"}, {"dtype": "bfloat16"}],
        "lse": [{}, {"lse": True}],
    }
