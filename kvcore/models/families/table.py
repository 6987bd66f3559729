"""The table of the docs: which model types `run` serves, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.models.facts import ModelAdapter
from kvcore.models.families import adapters_by_type
from kvcore.settings.cache import CacheSettings

# One config that every adapter can read: small, and with the fields that have no default anywhere.
SAMPLE = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "vocab_size": 256,
    "dtype": "float32",
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hybrid_override_pattern": "M*-EM*-E",
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "full_attn_idxs": [1, 3],
    "hybrid_layer_ids": [1, 3],
}


class BridgedRow(NamedTuple):
    """One model type.

    Attributes:
        model_type: As `config.json` names it.
        status: ``bridged`` or ``refused``.
        why: The condition under which it is bridged, or the reasons of the refusal.
    """

    model_type: str
    status: str
    why: str


def bridged_table(adapters: Sequence[type[ModelAdapter]] = ()) -> list[BridgedRow]:
    """Every known model type, sorted by name; `plan` serves them all."""
    rows = []
    for name, adapter in sorted(adapters_by_type(adapters).items()):
        config = {**SAMPLE, "model_type": name}
        facts = adapter().facts(config, dtype=None, cache=CacheSettings(mla="expanded"))
        compressed = adapter().facts(config, dtype=None, cache=CacheSettings(mla="latent"))
        reasons = [str(r.reason) for r in facts.refusals]
        if reasons:
            rows.append(BridgedRow(name, "refused", "; ".join(reasons)))
        else:
            latent = any(c.spec.kind == "latent" for c in compressed.caches)
            rows.append(BridgedRow(name, "bridged", "with cache.mla=expanded" if latent else ""))
    return rows
