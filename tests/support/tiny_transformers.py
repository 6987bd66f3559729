"""Tiny random models of transformers and padded batches for them."""

from __future__ import annotations

from pathlib import Path

import torch
from models.tiny import tiny_model


def plain_model(name: str, tmp_path: Path) -> torch.nn.Module:
    """transformers' own model with its own attention: sdpa, or eager where the architecture has no sdpa."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if name in ("gemma2", "gpt_oss", "mamba") else "sdpa"
    return AutoModelForCausalLM.from_pretrained(
        str(tiny_model(name, tmp_path)), dtype=torch.float32, attn_implementation=attention, local_files_only=True
    ).eval()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """The prompts as one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def random_prompts(count: int, *, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, 250, (n,), generator=generator).tolist() for n in lengths]
