"""Shell completion: a script for the shell, which asks this module for what may follow."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.cli.commands import NAMES
from kvcore.cli.commands import command as load
from kvcore.errors import ConfigError

_BASH = """_kvcore() {
  local line="${COMP_LINE:0:$COMP_POINT}" found
  mapfile -t found < <(kvcore --completion words "$line" 2>/dev/null)
  # bash cuts words at "=": only what comes after it is put in.
  local current="${line##* }" cut="${COMP_WORDS[COMP_CWORD]}"
  [[ $cut == "=" ]] && cut=""
  COMPREPLY=("${found[@]#"${current%"$cut"}"}")
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -F _kvcore kvcore"""
_ZSH = """#compdef kvcore
_kvcore() { compadd -Q -S "" -- ${(f)"$(kvcore --completion words "$LBUFFER" 2>/dev/null)"} }
compdef _kvcore kvcore"""
_FISH = "complete -c kvcore -f -a '(kvcore --completion words (commandline -cp) 2>/dev/null)'"
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
FLAGS = ("--help", "--cfg", "--config", "--config-dir", "-m")


def answer(words: Sequence[str]) -> str:
    """The script of a shell, or what may follow the beginning of a command line.

    Args:
        words: ``[SHELL]``, or ``["words", LINE]``.
    """
    if len(words) == 2 and words[0] == "words":
        return "\n".join(candidates(words[1]))
    if len(words) != 1 or words[0] not in SCRIPTS:
        raise ConfigError(
            "completion is for a shell",
            field="--completion",
            got=" ".join(words),
            allowed=list(SCRIPTS),
            remedy='for bash: eval "$(kvcore --completion bash)"',
        )
    return SCRIPTS[words[0]]


def candidates(line: str) -> list[str]:
    """Words that may stand where the line ends."""
    words = line.split()[1:]
    current = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        found = [*NAMES, "--help", "--version", "--completion"]
    elif words[0] not in NAMES:
        found = []
    else:
        found = _of_command(words[0], current)
    return sorted(word for word in found if word.startswith(current))


def _of_command(name: str, current: str) -> list[str]:
    from dataclasses import fields

    from kvcore.config.home import presets
    from kvcore.config.keys import all_keys
    from kvcore.registry.loader import installed

    command, registry = load(name), installed()
    keys = {key.path: key for key in all_keys(registry, command.root)}
    groups = [f.name for f in fields(command.root) if f.metadata.get("preset")]
    path, equals, _ = current.partition("=")
    if not equals:
        return [*FLAGS, *(["--prompt"] if command.prompts else []), *(f"{p}=" for p in [*keys, *groups])]
    if path in groups:
        values: Sequence[str] = presets(path)
    elif path in ("backend", "a", "b") or path.startswith("backend_by_kind."):
        values = ["auto", *registry.backends] if path not in ("a", "b") else [*registry.backends]
    elif path in keys and keys[path].type == "bool":
        values = ("true", "false")
    else:
        values = keys[path].choices or () if path in keys else ()
    return [f"{path}={value}" for value in values]
