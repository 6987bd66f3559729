"""Perplexity of the default model on MT-bench, for each cache format beside float32.

    python tests/benchmarks/bench_perplexity.py [--tokens 7000] [--page docs/kernels.md]

Every key and value goes through the cache: weights and activations stay float32, only what the cache holds
is coarser. Each text is both turns of one question.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
QUESTIONS = ROOT / "tests" / "data" / "mt_bench_questions.jsonl"
# (cache.dtype, cache.scales)
FORMATS = (
    ("float32", None),
    ("bfloat16", None),
    ("int8", "token_head"),
    ("fp8_e4m3", "tensor"),
    ("fp8_e4m3", "token_head"),
    ("fp8_e5m2", "tensor"),
    ("fp8_e5m2", "token_head"),
)
BEGIN, END = "<!-- perplexity: begin -->", "<!-- perplexity: end -->"


def texts(tokens: int) -> list[list[int]]:
    """Token ids of whole questions, at least `tokens` in all where there are as many."""
    from transformers import AutoTokenizer

    from kvcore.models.home import ensure_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_model(), local_files_only=True)
    found: list[list[int]] = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        found.append(tokenizer("\n\n".join(json.loads(line)["turns"]))["input_ids"])
        if sum(map(len, found)) >= tokens:
            break
    return found


def perplexity(ids: list[list[int]], dtype: str, scales: str | None) -> tuple[float, int]:
    """(perplexity, predicted tokens) through the torch backend with this cache."""
    from kvcore import LLM

    overrides = [
        "model=smollm2-135m",
        "model.dtype=float32",
        "backend=torch",
        "device=cpu",
        f"cache.dtype={dtype}",
        "cache.memory=256MiB",
        "cache.prefix_caching=false",
        "engine.max_model_len=2048",
        "engine.max_num_batched_tokens=512",
    ]
    llm = LLM(*overrides, *([f"cache.scales={scales}"] if scales else []))
    total, count = 0.0, 0
    for text in ids:
        (logits,) = llm.score([text])
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:]), reduction="sum")
        total, count = total + float(losses.double()), count + len(text) - 1
    return math.exp(total / count), count


def page(rows: list[dict[str, object]]) -> str:
    """The Markdown table."""
    lines = [
        f"Perplexity of SmolLM2-135M on {rows[0]['tokens']} tokens of MT-bench (both turns), weights and"
        " activations float32, backend torch; scales of `tensor` are 1.0:",
        "",
        "| cache | scales | perplexity | against float32 |",
        "|---|---|---:|---:|",
    ]
    for r in rows:
        lines.append(f"| {r['dtype']} | {r['scales'] or '-'} | {r['perplexity']:.4f} | {r['increase']:+.3%} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print JSON, and write the table where a page is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=7100)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ids, rows = texts(asked.tokens), list[dict[str, object]]()
    base = 0.0
    for dtype, scales in FORMATS:
        begun = time.monotonic()
        found, count = perplexity(ids, dtype, scales)
        base = base or found
        rows.append(
            {
                "dtype": dtype,
                "scales": scales,
                "perplexity": found,
                "increase": found / base - 1,
                "tokens": count,
                "seconds": round(time.monotonic() - begun, 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows))
    if asked.page:
        text = asked.page.read_text(encoding="utf-8")
        made = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{page(rows)}\n{END}", text, flags=re.DOTALL)
        asked.page.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
