"""`--help`: of the program (loads nothing heavy), and of a command, from its keys; `--cfg`: what was composed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.cli.commands import NAMES, Command
from kvcore.cli.commands import command as load
from kvcore.cli.result import Result

if TYPE_CHECKING:
    from kvcore.config.compose import Composed
    from kvcore.config.keys import Key
    from kvcore.registry.registry import Registry

_FLAGS = """  -m                 one job for each value of KEY=a,b,c
  --config FILE      keys from a YAML file; what is typed wins over it
  --config-dir DIR   presets of your own: DIR/model/NAME.yaml, device, backends/NAME, experiment
  --cfg              print every key with its value and who said it, and do nothing"""


def program() -> str:
    """The help of `kvcore` itself."""
    width = max(map(len, NAMES))
    lines = ["kvcore: the paged KV cache of LLM inference.", "", "usage: kvcore COMMAND [KEY=VALUE ...]", ""]
    lines += [f"  {name:{width}}  {load(name).summary}" for name in NAMES]
    lines += [
        "",
        "  kvcore COMMAND --help   keys of a command, with those of the installed backends and plugins",
        "  output=json             one JSON document on standard output, everything else on standard error",
        "  --completion SHELL      a script that completes commands and keys, for bash, zsh or fish",
        "  --version               the version",
        "",
        "exit status: 0 done; 1 the answer is no; 2 bad input or configuration; 3 a bug of kvcore",
        "start with: kvcore run --prompt 'Why is the sky blue?'",
    ]
    return "\n".join(lines)


def command(command: Command, registry: Registry, folders: Sequence[Path] = ()) -> str:
    """The help of one command."""
    from kvcore.config.home import presets
    from kvcore.config.keys import all_keys

    lines = [f"kvcore {command.name}: {command.summary}", "", f"usage: kvcore {command.name} {command.usage}", ""]
    if command.prompts:
        lines += [
            "  --prompt TEXT      a prompt, as it is typed; repeatable; - reads it from standard input.",
            "                     Without any, and without prompts=FILE, six samples are answered.",
        ]
    lines += [_FLAGS, ""]
    groups = [f.name for f in fields(command.root) if f.metadata.get("preset")] + ["experiment"]
    for group in (*groups, *(f"backends/{name}" for name in sorted(registry.backends))):
        found = presets(group, folders)
        lines += [f"  {group}=PRESET   {', '.join(found)}"] if found else []
    lines += ["", "keys:"]
    for key in all_keys(registry, command.root):
        lines += _shown(key)
    broken = [f"  {p.name} ({p.origin}): {p.reason}" for p in registry.plugins if p.broken]
    if broken:
        lines += ["", "plugins that are broken, and whose keys are missing here:", *broken]
    return "\n".join(lines)


def _shown(key: Key) -> list[str]:
    default = "" if key.default is None else f" = {key.default}" if key.default != "" else " = ''"
    notes = [key.help] if key.help else []
    if key.choices:
        notes.append("one of " + ", ".join(key.choices))
    bounds = (("at least", key.least), ("more than", key.above), ("at most", key.most))
    notes += [", ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)]
    text = "; ".join(note for note in notes if note)
    return [f"  {key.path}: {key.type}{default}", *([f"      {text}"] if text else [])]


def configuration(composed: Composed[Any], registry: Registry) -> Result:
    """Every key of a command with its value, and who said it."""
    from kvcore.config.keys import all_keys

    rows: dict[str, dict[str, Any]] = {}
    for key in all_keys(registry, type(composed.config)):
        node: Any = composed.config
        for part in key.path.split("."):
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        said = [o for name, o in composed.origins.items() if name == key.path or name.startswith(f"{key.path}.")]
        rows[key.path] = {"value": node, "from": said[-1] if said else "default"}
    width = max(len(name) for name in rows)
    text = "\n".join(f"{name:{width}}  {row['value']}  ({row['from']})" for name, row in rows.items())
    return Result({"config": rows}, text)
