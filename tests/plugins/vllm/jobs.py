"""The models and prompts that vLLM is asked, by itself and with our backends."""

from __future__ import annotations

from pathlib import Path

import torch
from models.tiny import tiny_model
from models.tiny_specs import SPECS
from support.mt_bench import first_turns

from kvcore.models.home import ensure_model

# Windows, soft-cap and sinks, with heads that vLLM's own CPU kernel has.
TINY = {
    "mistral_window": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_64": {},
    "gpt_oss": {"head_dim": 32},
}
LIMITS = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 48, "block_size": 32}


def smollm2() -> dict:
    """The default model and 16 prompts of MT-bench, 64 tokens each."""
    from tokenizers import Tokenizer

    path = ensure_model()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return {"model": str(path), "prompts": [tokenizer.encode(t).ids for t in first_turns(16)], "tokens": 64}


def tiny(folder: Path) -> dict[str, dict]:
    """A job for each tiny model: prompts longer than a step, more than run at once, one that begins as another."""
    torch.manual_seed(0)
    prompts = [torch.randint(1, 250, (n,)).tolist() for n in (70, 33, 20, 5)]
    prompts.append([*prompts[0][:64], 7, 8, 9])
    jobs = {}
    for name, changed in TINY.items():
        kind, given = SPECS[name]
        SPECS[f"{name}_in_vllm"] = (kind, {**given, **changed})
        jobs[name] = {"model": str(tiny_model(f"{name}_in_vllm", folder)), "prompts": prompts, "engine": LIMITS}
    return jobs
