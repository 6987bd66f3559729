"""Every list that says something of each layer: a mutant is refused, or it changes the plan."""

import json
from pathlib import Path

import pytest

from kvcore.errors import KVCoreError
from kvcore.models.config_json import read_config
from kvcore.models.families import model_facts

DATA = Path(__file__).parents[1] / "data" / "hf_configs"
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "dtype": "bfloat16",
    "sliding_window": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
TWO = [SLIDING, FULL] * 2
HYBRID = [LINEAR, FULL, LINEAR, LINEAR]
# Type, path of the list, the list, and what else the config needs.
TINY = [
    *((kind, "layer_types", TWO, {}) for kind in ("ministral", "smollm3", "cohere2", "olmo3", "exaone4", "gpt_oss")),
    *((kind, "layer_types", TWO, {}) for kind in ("gemma2", "gemma3_text", "gemma4_text", "mimo_v2_flash", "step3p5")),
    *((kind, "layer_types", TWO, {"use_sliding_window": True}) for kind in ("qwen2", "qwen3", "qwen2_moe")),
    *((kind, "layer_types", [FULL] * 4, {}) for kind in ("llama", "mistral", "qwen3_moe", "deepseek_v3", "gpt2")),
    ("gemma3n_text", "layer_types", TWO, {"num_kv_shared_layers": 0}),
    ("llama4_text", "layer_types", ["chunked_attention", FULL] * 2, {}),
    ("llama4_text", "no_rope_layers", [1, 1, 1, 0], {}),
    ("smollm3", "no_rope_layers", [1, 1, 1, 0], {}),
    *((kind, "layer_types", HYBRID, {}) for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")),
    ("lfm2", "layer_types", ["conv", FULL] * 2, {}),
    ("lfm2", "full_attn_idxs", [1, 3], {}),
    ("bamba", "attn_layer_indices", [1, 3], {"mamba_n_heads": 8, "mamba_d_head": 16}),
    ("granitemoehybrid", "layer_types", ["mamba", "attention"] * 2, {"mamba_n_heads": 8, "mamba_d_head": 16}),
    ("zamba2", "layers_block_type", ["mamba", "hybrid"] * 2, {"n_mamba_heads": 4, "head_dim": None}),
    ("zamba2", "hybrid_layer_ids", [1, 3], {"n_mamba_heads": 4, "head_dim": None}),
    ("nemotron_h", "layers_block_type", ["mamba", "moe", "attention", "mlp"], {}),
    ("nemotron_h", "hybrid_override_pattern", list("ME*-"), {}),
    ("kimi_linear", "linear_attn_config.full_attn_layers", [2], {"linear_attn_config.kda_layers": [1, 3, 4]}),
    ("kimi_linear", "linear_attn_config.kda_layers", [1, 3, 4], {"linear_attn_config.full_attn_layers": [2]}),
    ("glm_moe_dsa", "indexer_types", ["full", "shared"] * 2, {}),
    ("glm_moe_dsa", "layer_types", ["deepseek_sparse_attention"] * 4, {}),
    ("glm_moe_dsa", "index_topk_pattern", list("FSFS"), {}),
    ("mimo_v2_flash", "hybrid_layer_pattern", [0, 1, 1, 0], {}),
    ("minimax_m3", "sparse_attention_config.sparse_attention_freq", [0, 1, 1, 1], {}),
    ("minimax_m2", "attn_type_list", [1, 1, 1, 1], {}),
]
# Fields of the real configs that hold one entry a layer and say nothing on caches.
NO_CACHE = {"moe_layer_freq", "mlp_layer_types", "mlp_only_layers"}
AS_TEXT = ("hybrid_override_pattern", "index_topk_pattern")


def put(config, path, value):
    """A copy of a config with one entry replaced, by its dotted path."""
    first, _, rest = path.partition(".")
    return {**config, first: put(config.get(first, {}), rest, value) if rest else value}


def mutants(values):
    """The list, spoilt in every way that a per-layer list can be."""
    yield "shorter", values[:-1]
    yield "longer", [*values, values[-1]]
    yield "twice", [*values[:1], *values]
    yield "empty", []
    for bad in (-1, 10**6, "unknown", True, 1.5, None, {}, [0], "", float("nan")):
        yield f"first {bad!r}", [bad, *values[1:]]
        yield f"last {bad!r}", [*values[:-1], bad]
    for other in (5, "list", {"0": "full"}, True):
        yield f"instead {other!r}", other


def plan(config):
    found = model_facts(config)
    return found.num_layers, [(c.spec, c.query, c.shares) for c in found.caches]


def survivors(config, path, values):
    """Mutants that are taken and change nothing."""
    before = plan(config)
    for name, mutant in mutants(values):
        if path in AS_TEXT and isinstance(mutant, list):
            if not all(isinstance(letter, str) for letter in mutant):
                continue
            mutant = "".join(mutant)
        try:
            if plan(put(config, path, mutant)) == before:
                yield name
        except KVCoreError:
            continue


@pytest.mark.parametrize(("kind", "path", "values", "more"), TINY, ids=[f"{k}-{p}" for k, p, _, _ in TINY])
def test_mutants_of_every_list(kind, path, values, more):
    config = {**BASE, "model_type": kind}
    for name, value in more.items():
        config = put(config, name, value)
    config = {name: value for name, value in config.items() if value is not None}
    config = put(config, path, "".join(values) if path in AS_TEXT else values)
    # An empty list of layers without rope means the model type's own pattern, to transformers too.
    allowed = {"empty"} if path == "no_rope_layers" else set()
    assert set(survivors(config, path, values)) <= allowed


def lists_of(config, layers, at=""):
    """Paths of the lists in a config that can be about its layers."""
    for name, value in config.items():
        if isinstance(value, dict) and not name.startswith(("vision", "quantization")):
            yield from lists_of(value, layers, f"{at}{name}.")
        elif isinstance(value, list) and (len(value) == layers or name.endswith(("_layers", "_idxs", "_ids"))):
            yield f"{at}{name}", value


@pytest.mark.parametrize("file", sorted(DATA.glob("*.json")), ids=lambda file: file.stem)
def test_mutants_of_the_lists_of_real_configs(file):
    config = read_config(file)
    try:
        layers = plan(config)[0]
    except KVCoreError:
        pytest.skip("refused as it is")
    for path, values in lists_of(config, layers):
        if path.split(".")[-1] not in NO_CACHE:
            assert set(survivors(config, path, values)) == set(), path


def test_every_family_of_lists_is_here():
    named = {path.split(".")[-1] for _, path, _, _ in TINY}
    source = (Path(__file__).parents[2] / "kvcore" / "models").rglob("*.py")
    text = "".join(file.read_text() for file in source)
    read = {name for name in named if json.dumps(name) in text}
    assert read == named
