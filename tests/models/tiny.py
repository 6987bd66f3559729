"""Tiny random models of every architecture, made on the spot and kept for the session.

Weights are scaled up so that attention matters: with transformers' own initialization greedy tokens
barely notice that attention is gone. `tests/models/test_bridge_sensitivity.py` asserts that they do.
"""

# ruff: noqa: C408
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SMALL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=512,
)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=32)
MLA = dict(
    SMALL,
    num_key_value_heads=4,
    moe_intermediate_size=32,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, rope_theta=10000.0)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    rope_theta=10000.0,
    original_max_position_embeddings=96,
)

# name -> (config class of transformers, its arguments)
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    # Head dimension 64, the smallest that every backend takes.
    "llama_64": ("LlamaConfig", dict(SMALL, head_dim=64)),
    "llama_yarn": ("LlamaConfig", dict(SMALL, rope_parameters=YARN)),
    "mistral_window": ("MistralConfig", dict(SMALL, sliding_window=16)),
    "mixtral": ("MixtralConfig", dict(SMALL, num_local_experts=4, num_experts_per_tok=2)),
    "gemma": ("GemmaConfig", dict(SMALL, head_dim=16)),
    "gemma2": (
        "Gemma2Config",
        dict(
            SMALL,
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=16,
            attn_logit_softcapping=5.0,
            query_pre_attn_scalar=16,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(SMALL, num_hidden_layers=6, num_key_value_heads=1, head_dim=16, sliding_window=16),
    ),
    "gemma3_64": (
        "Gemma3TextConfig",
        dict(
            SMALL, num_hidden_layers=6, num_key_value_heads=1, head_dim=64, sliding_window=16, query_pre_attn_scalar=64
        ),
    ),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen2_window": ("Qwen2Config", dict(SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(SMALL, head_dim=32)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(SMALL, **MOE, num_experts=4, head_dim=16)),
    "deepseek_v2": ("DeepseekV2Config", dict(MLA, q_lora_rank=None)),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(MLA, q_lora_rank=32, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0)),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            SMALL,
            intermediate_size=64,
            num_hidden_layers=4,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
        ),
    ),
    "gpt2": ("GPT2Config", dict(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256)),
    "gpt2_layer_scale": (
        "GPT2Config",
        dict(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256, scale_attn_by_inverse_layer_idx=True),
    ),
    "mpt": ("MptConfig", dict(d_model=64, n_layers=2, n_heads=4, vocab_size=256, max_seq_len=256)),
    "bloom": ("BloomConfig", dict(hidden_size=64, n_layer=2, n_head=4, vocab_size=256)),
    "falcon": ("FalconConfig", dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)),
    "phi": ("PhiConfig", SMALL),
    "phi3": ("Phi3Config", dict(SMALL, pad_token_id=0, original_max_position_embeddings=512)),
    "phi3_longrope": (
        "Phi3Config",
        dict(SMALL, pad_token_id=0, original_max_position_embeddings=96, rope_parameters=LONGROPE),
    ),
    "starcoder2": ("Starcoder2Config", dict(SMALL, sliding_window=16)),
    "cohere": ("CohereConfig", SMALL),
    "cohere2": ("Cohere2Config", dict(SMALL, num_hidden_layers=4, sliding_window=16)),
    "olmo": ("OlmoConfig", SMALL),
    "olmo2": ("Olmo2Config", SMALL),
    "olmo3": ("Olmo3Config", dict(SMALL, num_hidden_layers=4, sliding_window=16)),
    "olmoe": ("OlmoeConfig", dict(SMALL, num_experts=4, num_experts_per_tok=2)),
    "glm": ("GlmConfig", dict(SMALL, head_dim=16, pad_token_id=0)),
    "glm4": ("Glm4Config", dict(SMALL, head_dim=16, pad_token_id=0)),
    "seed_oss": ("SeedOssConfig", dict(SMALL, head_dim=16)),
    "ernie4_5": ("Ernie4_5Config", dict(SMALL, head_dim=16)),
    "stablelm": ("StableLmConfig", SMALL),
    "granite": ("GraniteConfig", dict(SMALL, attention_multiplier=0.2)),
    "granitemoe": (
        "GraniteMoeConfig",
        dict(SMALL, attention_multiplier=0.2, num_local_experts=4, num_experts_per_tok=2),
    ),
    "ministral": ("MinistralConfig", dict(SMALL, head_dim=16, sliding_window=16)),
    "ministral3": (
        "Ministral3Config",
        dict(
            SMALL,
            head_dim=16,
            rope_parameters=dict(
                YARN,
                llama_4_scaling_beta=0.1,
                beta_fast=32.0,
                beta_slow=1.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
    ),
    "gemma4": (
        "Gemma4TextConfig",
        dict(
            SMALL,
            num_hidden_layers=6,
            head_dim=16,
            global_head_dim=32,
            sliding_window=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
        ),
    ),
    "gemma4_shared": (
        "Gemma4TextConfig",
        dict(
            SMALL,
            num_hidden_layers=8,
            head_dim=16,
            global_head_dim=32,
            sliding_window=16,
            num_kv_shared_layers=4,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=256,
            layer_types=["sliding_attention", "full_attention"] * 4,
        ),
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        dict(
            SMALL,
            num_hidden_layers=10,
            head_dim=16,
            sliding_window=16,
            num_kv_shared_layers=5,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=256,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 10,
            intermediate_size=[128] * 10,
        ),
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        dict(
            SMALL,
            **MOE,
            num_hidden_layers=4,
            head_dim=24,
            v_head_dim=16,
            sliding_window=17,
            n_routed_experts=4,
            layer_types=["full_attention", "sliding_attention"] * 2,
        ),
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        dict(
            hidden_size=64,
            num_layers=2,
            num_attention_heads=4,
            vocab_size=256,
            max_position_embeddings=512,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=32,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            head_dim=8,
            v_head_dim=16,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
        ),
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", dict(MLA, q_lora_rank=32)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(SMALL, **MOE, num_experts=4, shared_expert_intermediate_size=32)),
    "exaone4": ("Exaone4Config", dict(SMALL, num_hidden_layers=4, sliding_window=16)),
    "minimax_m2": ("MiniMaxM2Config", dict(SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    "minicpm3": (
        "MiniCPM3Config",
        dict(
            SMALL,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    ),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "gptj": ("GPTJConfig", dict(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256, rotary_dim=8)),
    "gpt_bigcode": ("GPTBigCodeConfig", dict(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256)),
    "opt": (
        "OPTConfig",
        dict(
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=256,
            word_embed_proj_dim=64,
            max_position_embeddings=256,
        ),
    ),
    "jamba": (
        "JambaConfig",
        dict(
            SMALL,
            num_hidden_layers=8,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=4,
            attn_layer_offset=1,
            mamba_d_state=8,
            use_mamba_kernels=False,
        ),
    ),
    "mamba": ("MambaConfig", dict(hidden_size=64, state_size=16, num_hidden_layers=2, vocab_size=256)),
    "mamba2": (
        "Mamba2Config",
        dict(
            hidden_size=64,
            state_size=16,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=16,
            n_groups=1,
            vocab_size=256,
            expand=2,
        ),
    ),
    "zamba2": (
        "Zamba2Config",
        dict(
            SMALL,
            num_hidden_layers=6,
            num_key_value_heads=4,
            mamba_d_state=16,
            n_mamba_heads=8,
            mamba_ngroups=1,
            use_mem_rope=True,
            hybrid_layer_ids=[2, 5],
            num_mem_blocks=1,
            layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        ),
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        dict(
            SMALL,
            shared_intermediate_size=64,
            num_hidden_layers=4,
            layer_types=["mamba", "mamba", "attention", "mamba"],
            num_local_experts=2,
            num_experts_per_tok=1,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=1,
        ),
    ),
    "falcon_h1": (
        "FalconH1Config",
        dict(SMALL, mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128, mamba_d_state=16, mamba_n_groups=1),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            SMALL,
            **MOE,
            num_hidden_layers=4,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=32,
        ),
    ),
    "lfm2": (
        "Lfm2Config",
        dict(SMALL, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"]),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        dict(
            SMALL,
            num_hidden_layers=4,
            head_dim=16,
            hybrid_override_pattern="M-*-",
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=1,
        ),
    ),
    "smollm3": ("SmolLM3Config", dict(SMALL, num_hidden_layers=4, pad_token_id=0)),
    "glm4_moe": ("Glm4MoeConfig", dict(SMALL, **MOE, n_routed_experts=4, head_dim=16, first_k_dense_replace=1)),
    "llama4": (
        "Llama4TextConfig",
        dict(
            SMALL,
            intermediate_size=32,
            intermediate_size_mlp=64,
            num_hidden_layers=4,
            head_dim=16,
            num_local_experts=2,
            attention_chunk_size=16,
            floor_scale=4,
        ),
    ),
    "llama4_default": (
        "Llama4TextConfig",
        dict(
            SMALL,
            intermediate_size=32,
            intermediate_size_mlp=64,
            num_hidden_layers=4,
            head_dim=16,
            num_local_experts=2,
            attention_chunk_size=16,
        ),
    ),
}
# The architectures whose parity is part of every test run; the others run with `-m long`.
DEFAULT_RUN = ("llama", "mistral_window", "gemma2", "gemma3", "gpt_oss", "llama4", "phi3", "deepseek_v3")
_made: dict[str, Path] = {}


def tiny_model(name: str, tmp_path: Path) -> Path:
    """A Hugging Face directory of the tiny model `name`, made once a session.

    Args:
        name: A key of `SPECS`.
        tmp_path: Where it is made the first time; any temporary directory that outlives the session's tests.
    """
    if name not in _made or not (_made[name] / "config.json").is_file():
        directory = Path(tmp_path) / f"tiny-{name}"
        _build(name, directory)
        _made[name] = directory
    return _made[name]


def reference_model(path: Path) -> torch.nn.Module:
    """transformers' own model of a directory, with its eager attention, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def _build(name: str, directory: Path) -> None:
    import transformers
    from transformers import AutoModelForCausalLM

    class_name, arguments = SPECS[name]
    config = getattr(transformers, class_name)(**arguments)
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            _scale(label, parameter)
    model.save_pretrained(directory)
    # The same tests read the file as people write it: without what transformers adds on saving.
    file = directory / "config.json"
    saved = json.loads(file.read_text())
    saved.pop("transformers_version", None)
    file.write_text(json.dumps(saved, indent=1))


def _scale(label: str, parameter: torch.nn.Parameter) -> None:
    """Give matrices a gain above 1, sinks and biases a spread; norms and the state's own stay."""
    if label.endswith("sinks"):
        parameter.normal_(1.0, 0.7)
    elif any(part in label for part in ("A_log", "dt_bias", "conv1d", ".D")):
        return
    elif label.endswith("bias"):
        parameter.normal_(0.0, 0.1)
    elif parameter.ndim >= 2:
        fan_in = parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]
        gain = 2.0 if any(p in label for p in ("q_proj", "k_proj", "q_b_proj", "qkv", "query", "c_attn")) else 1.0
        parameter.normal_(0.0, gain * fan_in**-0.5)
