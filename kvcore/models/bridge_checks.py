"""What a module asks of attention must be what its `AttentionQuery` declares; a difference is an error."""

from __future__ import annotations

from math import isclose
from typing import Any

import torch

from kvcore.attention.query import AttentionQuery
from kvcore.errors import UnsupportedModelError
from kvcore.spec.cache_spec import CacheId


def check_call(
    cache_id: CacheId,
    module: torch.nn.Module,
    query: AttentionQuery,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    passed: dict[str, Any],
    longest: int | None = None,
) -> None:
    """Raise unless shapes and keywords of a call agree with the declared facts.

    `longest` is the longest sequence that is served, where the facts know it: a window of that size is none.

    Raises:
        UnsupportedModelError: Names the layer, the fact, what the module passed and what is declared.
    """
    query_THD, key_TKD, value_TKDv = tensors
    facts = (
        ("num_heads", query_THD.shape[1], query.num_heads),
        ("num_kv_heads", key_TKD.shape[1], query.num_kv_heads),
        ("head_dim", query_THD.shape[2], query.head_dim),
        ("head_dim of keys", key_TKD.shape[2], query.head_dim),
        ("head_dim_v", value_TKDv.shape[2], query.head_dim_v),
        ("tokens of keys", key_TKD.shape[0], query_THD.shape[0]),
        ("dropout", passed.get("dropout") or 0.0, 0.0),
        ("is_causal", _causal(module, passed), query.mask.causal),
        ("softcap", passed.get("softcap"), query.softcap),
        ("sinks", passed.get("s_aux") is not None, query.sinks),
    )
    for name, got, declared in facts:
        if got != declared:
            raise _mismatch(cache_id, module, name, got, declared)
    scale = passed.get("scaling")
    scale = query_THD.shape[2] ** -0.5 if scale is None else float(scale)
    if not isclose(scale, query.softmax_scale, rel_tol=1e-6):
        raise _mismatch(cache_id, module, "scaling", scale, query.softmax_scale)
    # Some modules leave the window to the mask alone; those that name it must name ours.
    window = passed.get("sliding_window")
    if isinstance(window, int) and longest is not None and window >= longest:
        window = None
    if "sliding_window" in passed and window != query.mask.window:
        raise _mismatch(cache_id, module, "sliding_window", passed["sliding_window"], query.mask.window)


def _causal(module: torch.nn.Module, passed: dict[str, Any]) -> bool:
    given = passed.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _mismatch(
    cache_id: CacheId, module: torch.nn.Module, name: str, got: object, declared: object
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(module).__name__} of {cache_id} asks for attention that its config does not declare",
        field=name,
        got=got,
        allowed=declared,
        remedy="the adapter of this model type does not fit this version of transformers",
    )
