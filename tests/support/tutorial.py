"""Plays a tutorial: writes the files that its blocks show, runs its commands, compares what they print.

```{code-block} python         a piece of the file named by the caption; later pieces are appended
:caption: folder/file.py

```console                     `$ command`, then what it prints; ... stands for anything
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\{code-block\} )?(\w+)\n(?::caption: (\S+)\n\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A piece of a file."""

    path: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command and what it should print."""

    words: tuple[str, ...]
    expected: str

    @property
    def line(self) -> str:
        """As it is typed."""
        return shlex.join(self.words)

    @property
    def fails(self) -> bool:
        """Whether what is shown is an error of ours."""
        return self.expected.startswith("kvcore: ")


def parse(page: str) -> list[Piece | Command]:
    """The steps in order; a block that is neither a file nor a console is an error: it would never run."""
    steps: list[Piece | Command] = []
    for directive, language, caption, body in BLOCK.findall(page):
        if caption:
            steps.append(Piece(caption, body))
        elif language == "console" and not directive:
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, expected = part.partition("\n")
                steps.append(Command(tuple(shlex.split(line)), expected))
        else:
            raise ValueError(f"this block is never executed: {body[:80]!r}")
    if page.count("\n```") != 2 * len(BLOCK.findall(page)):
        raise ValueError("some fenced block was not understood")
    return steps


def files(steps: list[Piece | Command]) -> dict[str, str]:
    """The files that the pieces make: two blank lines before what begins at the margin, else one."""
    made: dict[str, str] = {}
    for piece in steps:
        if isinstance(piece, Piece):
            before = made.get(piece.path)
            gap = "" if before is None else "\n" if piece.text.startswith(" ") else "\n\n"
            made[piece.path] = (before or "") + gap + piece.text
    return made


def matches(expected: str, printed: str) -> bool:
    """Whether the text is what was expected; a line of dots alone stands for any lines."""
    pattern = ""
    for line in expected.rstrip("\n").split("\n"):
        whole = re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        pattern += r"(?:.*\n)*?" if line == "..." else whole
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n") is not None


class Scratch:
    """A scratch folder with an environment of its own, which sees kvcore and its libraries.

    Args:
        repo: The checkout, whose kvcore it sees.
        folder: An empty folder.
    """

    def __init__(self, repo: Path, folder: Path) -> None:
        self.folder = folder
        self.root = folder.parent / f"{folder.name}-env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.root)], check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(self.root)}))
        paths = [repo, repo / "backends", repo / "plugins", sysconfig.get_path("purelib")]
        (site / "libraries.pth").write_text("".join(f"{p}\n" for p in paths))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in the folder; `pip`, `kvcore` and `pytest` are those of the environment."""
        python = str(self.root / "bin" / "python")
        programs = {
            "pip": [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python],
            "kvcore": [python, "-m", "kvcore"],
            "pytest": [python, "-m", "pytest"],
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [*programs[words[0]], *words[1:]], cwd=self.folder, env=kept, capture_output=True, text=True, check=False
        )
