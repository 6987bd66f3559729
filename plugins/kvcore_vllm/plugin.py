"""Entry point of vLLM's plugin group ``vllm.general_plugins``: called in each of its processes."""

from __future__ import annotations

from kvcore_vllm.serving import asked_for
from kvcore_vllm.signatures import require_known_vllm

ATTENTION = "kvcore_vllm.attention.KvcoreAttention"


def register() -> None:
    """Take the place of one of vLLM's attention backends where `KVCORE_BACKEND` is set; else do nothing.

    Raises:
        BackendUnavailableError: This vLLM is none that is known here.
    """
    if not asked_for():
        return
    require_known_vllm()
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # On CPUs vLLM hands out its own whatever was asked for, so those names are taken over; layers with latents (the
    # two others) are then refused by ours, not served by vLLM's.
    names = ("CPU_ATTN", "CPU_MLA", "AMX_MLA") if current_platform.is_cpu() else ("CUSTOM",)
    for name in names:
        register_backend(AttentionBackendEnum[name], ATTENTION)
