"""The commands by name. A command's module is imported when it runs: listing them loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: What is typed.
        summary: One line of help.
        usage: What may follow the name.
        built: Whether it exists yet.
    """

    name: str
    summary: str
    usage: str = "[KEY=VALUE ...] [-m]"
    built: bool = True

    @property
    def module(self) -> str:
        """The module with its `execute`."""
        return f"kvcore.cli.{self.name}"


_ALL = (
    Command("run", "answer prompts with a model on the paged cache", "[--prompt TEXT ...] [KEY=VALUE ...] [-m]"),
    Command("plan", "how many tokens fit, on what layout, and why; needs neither weights nor GPU"),
    Command("backends", "every attention backend for this model, cache and device: usable, or why not"),
    Command("plugins", "installed plugins and their state"),
    Command("layout", "a picture of the cache memory: groups, tensors, pages, fields, padding"),
    Command("env", "versions, device, libraries, plugins: what a bug report needs"),
    Command(
        "conform",
        "the conformance kit: proves attention backends right, case by case",
        "[backend=NAME | backend=A,B | backend=all] [KEY=VALUE ...] [-m]",
    ),
    Command(
        "diff",
        "one batch, or a whole model, through two backends: where they part first",
        "a=NAME b=NAME [case=ID | --prompt TEXT ...] [KEY=VALUE ...] [-m]",
    ),
    Command("replay", "scheduler and cache on a trace, without weights", built=False),
    Command("bench", "ratios against named baselines", "what=attention|write [KEY=VALUE ...] [-m]"),
)
COMMANDS = {c.name: c for c in _ALL}
