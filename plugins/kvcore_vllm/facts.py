"""From vLLM's words for a layer to `AttentionQuery`, and what this bridge does not serve. Imports no vLLM."""

from __future__ import annotations

from typing import Any

import torch

from kvcore.backend import AttentionQuery, BackendUnsupportedError, Mask

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# vLLM's names for the element type of a cache, beside `auto`.
FLOATS = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
# What changes steps or blocks in ways that nothing here was proved for: vLLM's setting, and what it says when unused.
UNSERVED = {
    "speculative_config": None,
    "model_config.is_hybrid": False,
    "model_config.is_mm_prefix_lm": False,
    "model_config.rswa_window": None,
    "cache_config.kv_sharing_fast_prefill": False,
}


def query_of(
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    alibi: bool,
    sinks: bool,
) -> AttentionQuery:
    """What a layer of vLLM asks; the words are those of its `AttentionImpl`.

    Args:
        dtype: Element type of the model's activations.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Elements of a head of queries, keys and values.
        scale: Softmax scale.
        sliding_window: Keys that a query sees, its own included; None for all.
        kv_cache_dtype: Element type of the cache in vLLM's words.
        logits_soft_cap: None or 0 for none.
        alibi: Whether there are slopes.
        sinks: Whether there are sinks.

    Raises:
        BackendUnsupportedError: An element type that has no name here.
    """
    if dtype not in DTYPES:
        raise unserved("dtype", str(dtype), list(DTYPES.values()))
    if kv_cache_dtype != "auto" and kv_cache_dtype not in FLOATS | FP8:
        raise unserved("kv_cache_dtype", kv_cache_dtype, ["auto", *FLOATS, *FP8])
    name = DTYPES[dtype]
    return AttentionQuery(
        content="kv",
        dtype=name,
        cache_dtype=name if kv_cache_dtype == "auto" else (FLOATS | FP8)[kv_cache_dtype],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        head_dim_v=head_size,
        mask=Mask(window=sliding_window),
        scale=None if scale == head_size**-0.5 else scale,
        softcap=logits_soft_cap or None,
        alibi=alibi,
        sinks=sinks,
        quant="tensor" if kv_cache_dtype in FP8 else None,
    )


def require_served(config: Any) -> None:
    """Raise `BackendUnsupportedError` where vLLM's configuration asks for something in `UNSERVED`.

    Args:
        config: vLLM's `VllmConfig`.
    """
    for path, unused in UNSERVED.items():
        found = config
        for name in path.split("."):
            found = getattr(found, name)
        if found != unused:
            raise unserved(path, found, unused)


def unserved(field: str, got: object, allowed: object) -> BackendUnsupportedError:
    """The error of start-up; none of these is a fact that a backend was asked about."""
    return BackendUnsupportedError(
        "kvcore does not serve this in vLLM",
        field=field,
        got=got,
        allowed=allowed,
        remedy="unset KVCORE_BACKEND to be served by vLLM's own attention",
    )
