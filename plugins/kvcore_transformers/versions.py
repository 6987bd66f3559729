"""Does the installed transformers have what this plugin relies on? Asked when the plugin is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import masking_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcore.backend import require_parameters


def require_versions() -> None:
    """Raise unless every function that the plugin relies on has the parameters that it passes.

    Raises:
        BackendUnavailableError: Names the function, the parameter and the version that is installed.
    """
    installed = f"transformers {transformers.__version__} with torch {torch.__version__}"
    relied_on: tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...] = (
        ("Cache", Cache.__init__, ("layers",)),
        ("Cache.crop", Cache.crop, ("tokens_to_remove",)),
        ("Cache.get_mask_sizes", Cache.get_mask_sizes, ("query_length", "layer_idx")),
        ("Cache.reorder_cache", Cache.reorder_cache, ("beam_idx",)),
        ("Cache.batch_select_indices", Cache.batch_select_indices, ("indices",)),
        ("Cache.batch_repeat_interleave", Cache.batch_repeat_interleave, ("repeats",)),
        ("Cache.activate_past_recording", Cache.activate_past_recording, ()),
        ("CacheLayerMixin.update", CacheLayerMixin.update, ("key_states", "value_states")),
        ("CacheLayerMixin.get_mask_sizes", CacheLayerMixin.get_mask_sizes, ("query_length",)),
        # What tells a plain mask from one with an overlay of the caller's.
        ("sdpa_mask", masking_utils.sdpa_mask, ("attention_mask", "allow_is_causal_skip", "use_vmap")),
        ("register_forward_hook", torch.nn.Module.register_forward_hook, ("with_kwargs", "always_call")),
        ("register_forward_pre_hook", torch.nn.Module.register_forward_pre_hook, ("with_kwargs",)),
    )
    for shown, function, names in relied_on:
        require_parameters(function, names, shown=shown, backend="kvcore_transformers", version=installed)
