"""What transformers calls for every attention layer, registered under a name of its own.

The name ``kvcore`` belongs to the bridge of kvcore's own engine, which hands over flat batches; here they are padded.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvcore.backend import ConfigError, IntegrityError
from kvcore_transformers.forward import ForwardPass

NAME = "kvcore_paged"
# The forward pass travels with the keyword arguments that models hand on to their attention: nothing is global.
KEYWORD = "kvcore_forward_pass"


def paged_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTDv: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **passed: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: [B, T, H, Dv], and no weights."""
    forward_pass = passed.pop(KEYWORD, None)
    if not isinstance(forward_pass, ForwardPass):
        raise IntegrityError(
            f"{type(module).__name__} is called without a PagedCache, or does not hand its keyword arguments on",
            field="past_key_values",
            got=None,
            allowed="PagedCache.for_model(model), given to the model that it was made for",
            remedy="or model.set_attn_implementation('sdpa')",
        )
    if attention_mask is not None:
        raise ConfigError(
            "masks follow from the model's config and from padding alone",
            field="attention_mask",
            got=list(attention_mask.shape),
            allowed="[sequences, columns]",
        )
    return forward_pass.attend(module, (query_BHTD, key_BKTD, value_BKTDv), passed), None


def no_mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> None:
    """No mask tensor: padding is known before the pass, the rest is part of each layer's query.

    Raises:
        ConfigError: The model lays something of its own over the causal mask.
    """
    if use_vmap or not allow_is_causal_skip:
        raise ConfigError(
            "this model lays a mask of its own over the causal one",
            field="attention_mask",
            got="an overlay, as of image tokens, bidirectional blocks or packed sequences",
            allowed="causal attention, with the windows and chunks of the config",
        )


AttentionInterface.register(NAME, paged_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)
