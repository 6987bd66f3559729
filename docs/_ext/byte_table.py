"""Bytes that one token adds to the caches of published models: counted by hand, stored, and why they differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvcore.models.facts import ModelFacts
from kvcore.models.families import model_facts
from kvcore.spec.retention import Encoder

NO_HAND = {
    "gemma-4-26b-a4b": "window and full layers have unlike heads",
    "kimi-k3": "latents beside states",
    "longcat-flash": "two attentions a layer, 28 layers by the class's default",
    "mimo-v2-flash": "window and full layers have unlike heads",
    "nvidia-nemotron-3-ultra-550b-a55b-bf16": "the fact file lists no layers: these are the class's own four",
    "whisper-tiny": "a decoder; its encoder's tokens are stored once",
}


def rows() -> list[tuple[str, int | None, int, int, str]]:
    """(model, bytes by hand or None, bytes stored, bytes of a sequence's states, why they differ).

    Raises:
        RuntimeError: A difference that no reason explains.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
    try:
        from cache_facts import config_of, fact_files
    finally:
        sys.path.pop(0)
    return [_row(known, model_facts(config_of(known), dtype="bfloat16")) for known in fact_files()]


def _row(known: dict[str, Any], facts: ModelFacts) -> tuple[str, int | None, int, int, str]:
    by_hand = known.get("derived_all_attn_layers_full_length")
    hand = None if by_hand is None else int(by_hand["bytes_per_token_bf16"])
    owned = {c: s for c, s in facts.owned.items() if not isinstance(s.retention, Encoder)}
    stored = int(sum(s.bytes_per_token for s in owned.values()))
    states = sum(s.content.bytes_per_request for s in owned.values() if s.content.per_request)
    if hand is None:
        return known["name"], None, stored, states, NO_HAND[known["name"]]
    shared = sum(int(facts.owned[owner].bytes_per_token) for owner in facts.shared.values())
    indexers = [int(s.bytes_per_token) for c, s in owned.items() if c.role == "indexer"]
    if hand - shared + sum(indexers) != stored:
        raise RuntimeError(f"{known['name']}: {hand} by hand, {stored} stored, and no reason for the difference")
    reasons = [f"{len(facts.shared)} layers read another's cache: - {shared:,}"] if shared else []
    reasons += [f"{len(indexers)} indexers keep a key of {indexers[0]} bytes: + {sum(indexers):,}"] if indexers else []
    return known["name"], hand, stored, states, "; ".join(reasons)


def table(docs: Path) -> str:
    """As Markdown."""
    lines = ["| model | by hand | stored | states of a sequence | why they differ |", "|---|---:|---:|---:|---|"]
    for name, hand, stored, states, why in rows():
        cells = (name, "" if hand is None else f"{hand:,}", f"{stored:,}", f"{states:,}" if states else "", why)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
