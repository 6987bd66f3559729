"""What `transformers` itself says: greedy continuations and full-sequence logits, without our cache."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# A difference is forgiven only where the reference's own two best logits lie this close.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Greedy:
    """Reference continuation of each prompt.

    Attributes:
        prompts: Token ids of the prompts.
        tokens: [prompts, new] generated ids.
        gaps: [prompts, new] best logit less second best, at each generated position.
    """

    prompts: list[list[int]]
    tokens: torch.Tensor
    gaps: torch.Tensor


def greedy(path: Path, prompts: list[list[int]], new_tokens: int) -> Greedy:
    """`generate` of transformers, EOS ignored, in two left-padded batches: the longest quarter apart."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.zeros(len(prompts), new_tokens, dtype=torch.long)
    gaps = torch.zeros(len(prompts), new_tokens)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    cut = len(prompts) * 3 // 4
    for members in (by_length[:cut], by_length[cut:]):
        tokens[members], gaps[members] = _generate(model, [prompts[i] for i in members], new_tokens)
    return Greedy(prompts, tokens, gaps)


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([step.topk(2).values for step in out.logits], dim=1)
    return out.sequences[:, longest:].clone(), best[..., 0] - best[..., 1]


def once(path: Path, make: Callable[[], object]) -> object:
    """Make a value in one test process and let the others read it."""
    with (path.parent / f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            torch.save(make(), path)
        return torch.load(path, weights_only=False)


def full_logits(path: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """float32 [len, V] logits of each sequence on its own, no cache: the plainest way to run the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids]), use_cache=False).logits[0].clone() for ids in sequences]
