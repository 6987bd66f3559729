"""Pages that list what the code declares: hooks, commands, keys, models, decisions."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvcore.cli.commands import NAMES, command
from kvcore.config.keys import all_keys
from kvcore.models.families.table import bridged_table
from kvcore.registry.hookspecs import PROJECT, HookSpecs
from kvcore.registry.loader import installed


def hooks(docs: Path) -> str:
    """Every hook with its arguments and what it is for."""
    parts = []
    for name, function in vars(HookSpecs).items():
        options = getattr(function, f"{PROJECT}_spec", None)
        if options is None:
            continue
        signature = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
        first = "The first answer that is not `None` decides.\n\n" if options.get("firstresult") else ""
        text = inspect.cleandoc(function.__doc__ or "")
        parts.append(f"## {name}\n\n```python\ndef {name}{_plain(signature)}\n```\n\n{first}{text}\n")
    return "\n".join(parts)


def _plain(signature: str) -> str:
    return signature.replace("'", "")


def commands(docs: Path) -> str:
    """The table of commands."""
    lines = ["| command | does |", "|---|---|"]
    lines += [f"| `kvcore {name}` | {command(name).summary} |" for name in NAMES]
    return "\n".join(lines) + "\n"


def keys(docs: Path) -> str:
    """Every key with its type, default and meaning, those of the installed backends and plugins included."""
    sections: dict[str, list[str]] = {}
    roots = [command(name).root for name in NAMES]
    found = {key.path: key for root in roots for key in all_keys(installed(), root)}
    for key in found.values():
        root = key.path.split(".")[0] if "." in key.path else "general"
        allowed = f"; one of {', '.join(map(str, key.choices))}" if key.choices else ""
        default = "" if key.default is None else f"`{key.default!r}`"
        row = f"| `{key.path}` | {key.type} | {default} | {key.help}{allowed} |"
        sections.setdefault(root, []).append(row.replace("\n", " "))
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return "\n".join(f"### {root}\n\n{head}" + "\n".join(rows) + "\n" for root, rows in sections.items())


def models(docs: Path) -> str:
    """Which model types `run` serves, and why not the others."""
    rows = bridged_table(installed().model_adapters)
    lines = ["| model type | run | why |", "|---|---|---|"]
    lines += [f"| `{row.model_type}` | {row.status} | {row.why.replace('|', '/')} |" for row in rows]
    return "\n".join(lines) + "\n"


def decisions(docs: Path) -> str:
    """The notes of every room under docs/decisions, a section a room."""
    parts = []
    for path in sorted((docs / "decisions").glob("*.md")):
        text = path.read_text().strip()
        levels = [len(m) for m in re.findall(r"^(#+) ", text, re.MULTILINE)]
        if levels and min(levels) == 1 and levels.count(1) == 1 and text.startswith("# "):
            text = text.partition("\n")[2].strip()  # the file's own title; the room's name serves
            levels = [n for n in levels if n > 1]
        shift = 3 - min(levels, default=3)

        def moved(match: re.Match[str], shift: int = shift) -> str:
            return "#" * (len(match[1]) + shift) + " "

        parts.append(f"## {path.stem}\n\n" + re.sub(r"^(#+) ", moved, text, flags=re.MULTILINE))
    return "\n\n".join(parts) + "\n"
