"""`Mutant`: one line of a right backend made wrong, as data; and how it comes to life.

Two backends of our own are the victims: `victim/` is dense and walks sequence by sequence, `partitioned/` pads
sequences into batches, cuts keys into partitions that are reduced afterwards, and packs keys by vectors.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import indent
from types import ModuleType

from kvcore.attention.declaration import BackendSpec
from kvcore.testing import Case, all_cases
from kvcore.testing.cases.base import here
from kvcore.testing.cases.option_sets import under_options
from kvcore.testing.cases.planning import Target

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """A broken backend.

    Attributes:
        name: Short name, also of its package.
        level: The level that must kill it.
        broken: What is wrong, in a sentence.
        file: Which file of the victim.
        old: The line that is changed, without indentation; it must appear once.
        new: What stands there instead; several lines keep their own inner indentation.
        cases: Beginnings of the ids of the level's cases that touch what is broken, in the order to run.
        reports: The field reports that it stands for (docs/mutants.md says what they are).
        victim: Which backend is changed.
        past: An axis of size and a number: no case of level quick below it notices. None where that is not claimed.
    """

    name: str
    level: str
    broken: str
    file: str
    old: str
    new: str
    cases: tuple[str, ...] = field(kw_only=True)
    reports: tuple[str, ...] = field(default=(), kw_only=True)
    victim: str = field(default="victim", kw_only=True)
    past: tuple[str, int] | None = field(default=None, kw_only=True)

    @property
    def line(self) -> int:
        """Index of the line in its file."""
        lines = (HERE / self.victim / self.file).read_text().splitlines()
        found = [i for i, text in enumerate(lines) if text.strip() == self.old]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {self.file} has {len(found)} lines {self.old!r}, not one")
        return found[0]

    def source(self) -> str:
        """The whole file with the line changed."""
        lines = (HERE / self.victim / self.file).read_text().splitlines()
        text = lines[self.line]
        lines[self.line] = indent(self.new, text[: len(text) - len(text.lstrip())])
        return "\n".join(lines) + "\n"

    def spec(self, folder: Path, prefix: str = "mutant") -> type[BackendSpec]:
        """Its declaration, imported from a package of its own below `folder`.

        Args:
            folder: Where the package is written.
            prefix: Begins the package's name; a process imports a name once.
        """
        return load(f"{prefix}_{self.name}", {self.file: self.source()}, folder, self.victim)

    def selected(self) -> list[Case]:
        """The cases of its level that touch what is broken."""
        known = catalogue(self.victim)
        found = [c for start in self.cases for c in known if c.id.startswith(f"{self.level}.{start}")]
        return list(dict.fromkeys(found))


def below(past: tuple[str, int]) -> list[Case]:
    """The cases of level quick that are smaller along an axis."""
    axis, least = past
    return [c for c in all_cases("quick") if c.seqs and c.sizes()[axis] < least]


@cache
def catalogue(victim: str = "victim") -> tuple[Case, ...]:
    """Every case of the kit, those of level full included, and those under the options that a victim names."""
    spec = declared(importlib.import_module(f"{__package__}.{victim}.spec"))
    return (*all_cases("full"), *under_options(Target(spec, spec.Config(), here()), "quick"))


def load(package: str, changed: dict[str, str], folder: Path, victim: str = "victim") -> type[BackendSpec]:
    """A copy of the victim with some files changed, as a package that any process can import.

    Args:
        package: Its name.
        changed: File names and their text.
        folder: Where it is written; put on `sys.path`.
        victim: Which backend is copied.
    """
    home = folder / package
    home.mkdir()
    for path in (HERE / victim).glob("*.py"):
        (home / path.name).write_text(changed.get(path.name, path.read_text()))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    return declared(importlib.import_module(f"{package}.spec"))


def declared(module: ModuleType) -> type[BackendSpec]:
    """The declaration that a module holds."""
    found = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, BackendSpec)]
    return next(x for x in found if x.__module__ == module.__name__)
