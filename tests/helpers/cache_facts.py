"""The fact files on models' cache geometry, and the `config.json` that each of them amounts to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "cache_facts.jsonl"
# What a fact file says of itself or derives, and what no config has.
ABOUT = frozenset(
    (
        "alibi", "attention_hidden_size", "attention_layers", "confidence", "derived_all_attn_layers_full_length",
        "head_dim_explicit", "hf_id", "layer_types_rle", "name", "note", "quant_method", "rope_parameters",
        "sliding_layers_rle", "source",
    )
)  # fmt: skip
# Kinds of layers in the spellings of fact files.
KINDS = {"sliding": "sliding_attention", "full": "full_attention"}
# Files that name no type: what their models are, by the beginning of the name; the longest that fits holds.
TYPES = {
    "command-r": "cohere",
    "ernie-4.5": "ernie4_5",
    "falcon": "falcon",
    "gemma-2": "gemma2",
    "gemma-3": "gemma3_text",
    "gemma-3n": "gemma3n_text",
    "glm-4.5": "glm4_moe",
    "jamba": "jamba",
    "kimi-linear": "kimi_linear",
    "llama": "llama",
    "longcat-flash": "longcat_flash",
    "meta-llama": "llama",
    "minicpm3": "minicpm3",
    "ministral-3": "ministral3",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo-2": "olmo2",
    "phi-2": "phi",
    "phi-4": "phi3",
    "pythia": "gpt_neox",
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
    "qwen3-next": "qwen3_next",
    "seed-oss": "seed_oss",
    "smollm2": "llama",
    "tinyllama": "llama",
    "whisper": "whisper",
    "zamba2": "zamba2",
}
# Fields of a type that its own class derives, and switches without which its fields would mean something else.
DERIVED = {"zamba2": ("mamba_headdim", "head_dim")}
IMPLIED = {"falcon": {"new_decoder_architecture": True}}


def fact_files() -> list[dict[str, Any]]:
    """All of them, by name."""
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of `config.json` that a fact file gives, under the names that its model type has."""
    config = {k: v for k, v in facts.items() if k not in ABOUT and not (k == "layer_types" and isinstance(v, dict))}
    kind = config.get("model_type")
    if kind is None:
        fitting = [begin for begin in TYPES if facts["name"].startswith(begin)]
        kind = config["model_type"] = TYPES[max(fitting, key=len)]
    runs = facts.get("layer_types_rle") or facts.get("sliding_layers_rle")
    if runs:
        config["layer_types"] = [KINDS.get(name, name) for name, count in runs for _ in range(count)]
    scaling = config.get("rope_scaling")
    rule = scaling and scaling.get("rope_type", scaling.get("type"))
    if scaling and rule in (None, kind):  # numbers without the rule that they belong to, or a rule of one's own
        del config["rope_scaling"]
    for name in DERIVED.get(kind, ()):
        config.pop(name)
    return config | IMPLIED.get(kind, {})
