"""`--help`: of the program (loads nothing), and of a command (from the schema and what is installed)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.cli.commands import COMMANDS, Command

if TYPE_CHECKING:
    from kvcore.registry.registry import Registry

_ELSEWHERE = ("level", "where", "html", "a", "b", "case")
# Nodes that change nothing for a command are left out of its help.
_NOT_FOR = {
    "plan": ("sampling", "prompts", "chat", "format", *_ELSEWHERE),
    "backends": ("sampling", "prompts", "chat", "plan", "format", *_ELSEWHERE),
    "layout": ("sampling", "prompts", "chat", "plan", *_ELSEWHERE),
    "run": ("plan", "format", *_ELSEWHERE),
    "conform": (
        "model",
        "chat",
        "backend_by_kind",
        "plugins",
        "cache",
        "engine",
        "parallel",
        "executor",
        "sampling",
        "prompts",
        "plan",
        "format",
        "a",
        "b",
        "case",
    ),
    "diff": ("backend", "backend_by_kind", "plan", "format", "level", "where", "html"),
    "plugins": None,
    "env": None,
}


def program() -> str:
    """The help of `kvcore` itself."""
    width = max(len(name) for name in COMMANDS)
    lines = ["kvcore: the paged KV cache of LLM inference.", "", "usage: kvcore COMMAND [KEY=VALUE ...]", ""]
    for command in COMMANDS.values():
        suffix = "" if command.built else " (not built yet)"
        lines.append(f"  {command.name:{width}}  {command.summary}{suffix}")
    lines += [
        "",
        "  kvcore COMMAND --help   keys of a command, with those of the installed backends and plugins",
        "  output=json             one JSON document on standard output, everything else on standard error",
        "  -m                      one job for each value of KEY=a,b,c",
        "  --version               the version",
        "",
        "exit status: 0 done; 1 the answer is no; 2 bad input or configuration; 3 a bug of kvcore",
        "start with: kvcore run --prompt 'Why is the sky blue?'",
    ]
    return "\n".join(lines)


def command(command: Command, registry: Registry) -> str:
    """The help of one command."""
    from kvcore.config.home import presets
    from kvcore.config.keys import all_keys

    lines = [f"kvcore {command.name}: {command.summary}", "", f"usage: kvcore {command.name} {command.usage}", ""]
    if command.name in ("run", "diff"):
        lines += [
            "  --prompt TEXT   a prompt, as it is typed; repeatable; - reads it from standard input.",
            "                  Without any, and without prompts=FILE, six samples are answered.",
            "",
        ]
    lines += [f"  model=PRESET    {', '.join(presets('model'))}", f"  device=PRESET   {', '.join(presets('device'))}"]
    for name in sorted(registry.backends):
        found = presets(f"backends/{name}")
        if found:
            lines.append(f"  backends/{name}=PRESET   {', '.join(found)}")
    hidden = _NOT_FOR.get(command.name, ())
    lines += ["", "keys:"]
    for key in all_keys(registry):
        root = key.path.partition(".")[0]
        mine = root in ("output", "backends", "plugins") if hidden is None else root not in hidden
        if not mine or key.help.startswith("(preset)"):
            continue
        default = "" if key.default is None else f" = {key.default}" if key.default != "" else " = ''"
        lines.append(f"  {key.path}: {key.type}{default}")
        notes = [key.help] if key.help else []
        if key.choices:
            notes.append("one of " + ", ".join(key.choices))
        if key.least is not None:
            notes.append(f"at least {key.least}" + (f", at most {key.most}" if key.most is not None else ""))
        if notes:
            lines.append("      " + "; ".join(notes))
    broken = [f"  {p.name} ({p.origin}): {p.reason}" for p in registry.plugins if p.broken]
    if broken:
        lines += ["", "plugins that are broken, and whose keys are missing here:", *broken]
    return "\n".join(lines)
