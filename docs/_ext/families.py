"""The model types of transformers that make text: which are planned, and why the others are refused."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from kvcore.models.families import adapters_by_type

STATES = frozenset(
    (
        "bailing_hybrid",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_text",
        "lara_mini",
        "lfm3",
        "minimax",
        "olmo_hybrid",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zaya",
    )
)
WHY = {
    "encoder": "encoders, which keep a cache only where they are told to be decoders",
    "encoder and decoder": "an encoder beside the decoder; of those only Whisper's two caches a layer are described",
    "decoder": "no adapter yet: nobody has compared what a layer keeps with transformers' own caches",
    "states": "states of a kind that no adapter describes",
}


def families(docs: Path) -> tuple[str, dict[str, list[str]], dict[str, list[str]]]:
    """(version of transformers, planned types by the type of their text part, refused types by reason)."""
    found = json.loads((docs.parent / "tests" / "data" / "transformers_families.json").read_text())
    known = adapters_by_type()
    planned: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for name, (text, kind) in found["types"].items():
        if text in known:
            planned[text].append(name)
        else:
            refused["states" if text in STATES else kind].append(name)
    return found["transformers"], planned, refused


def listing(docs: Path) -> str:
    """As Markdown."""
    version, planned, refused = families(docs)
    alone = [text for text, names in planned.items() if names == [text]]
    parts = {text: [n for n in names if n != text] for text, names in planned.items()}
    count, left = sum(map(len, planned.values())), sum(map(len, refused.values()))
    lines = [
        f"transformers {version} has {count + left} model types that make text: {count} are planned, {left} refused.",
        "",
        f"Planned by themselves: {_named(alone)}.",
        "",
        "| text part | planned with it |",
        "|---|---|",
        *(f"| `{text}` | {_named(names)} |" for text, names in sorted(parts.items()) if names),
        "",
        "| refused | why |",
        "|---|---|",
        *(f"| {_named(refused[kind])} | {why} |" for kind, why in WHY.items() if refused[kind]),
    ]
    return "\n".join(lines) + "\n"


def _named(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
