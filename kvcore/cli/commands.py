"""The commands: each lies in a file of its own that says what it takes and does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvcore.cli.result import Job, Result
from kvcore.config.schema import Root
from kvcore.errors import ConfigError

NAMES = ("run", "plan", "backends", "plugins", "layout", "env", "conform", "diff", "bench", "replay")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: What is typed; also its module, whose `execute` does the work and imports what is heavy.
        summary: One line of help.
        root: Its keys.
        usage: What may follow its name.
        prompts: Whether it takes `--prompt`.
        rewrite: Changes overrides before they are parsed, where Hydra's grammar is in the way.
        summarize: What a sweep of it ends in: from the jobs, more of the document and of the text.
    """

    name: str
    summary: str
    root: type[Root]
    usage: str = "[KEY=VALUE ...] [-m]"
    prompts: bool = False
    rewrite: Callable[[Sequence[str]], list[str]] = list
    summarize: Callable[[Sequence[Mapping[str, Any]]], tuple[dict[str, Any], str]] | None = None

    def execute(self, job: Job[Any]) -> Result:
        """Do the work."""
        done: Result = import_module(f"kvcore.cli.{self.name}").execute(job)
        return done


def command(name: str) -> Command:
    """The command of a name, one of `NAMES`."""
    found: Command = import_module(f"kvcore.cli.{name}").COMMAND
    return found


def backends_as_list(overrides: Sequence[str]) -> list[str]:
    """``backend=a,b`` as a list: one run over several backends, where another command would need -m.

    Raises:
        ConfigError: ``backend=`` is given twice, or names nothing.
    """
    given = [o for o in overrides if o.startswith("backend=")]
    names = [n.strip() for o in given for n in o.partition("=")[2].strip("'\"[] ").split(",")]
    if len(given) > 1 or not all(names):
        raise ConfigError(
            "name the backends once, with commas between them",
            field="backend",
            got=" ".join(given),
            allowed="backend=NAME or backend=A,B",
        )
    return [f"backend=[{','.join(names)}]" if o in given else o for o in overrides]
