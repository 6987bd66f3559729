"""First turns of MT-bench, from tests/data (source and licence there)."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data" / "mt_bench_questions.jsonl"


def first_turns(count: int) -> list[str]:
    """The first turn of `count` questions, evenly spread over the categories."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    step = len(rows) // count
    return [rows[i * step]["turns"][0] for i in range(count)]


def short_turns(count: int) -> list[str]:
    """The shortest first turns: real prompts for what costs a forward pass a test."""
    return sorted(first_turns(16), key=len)[:count]
