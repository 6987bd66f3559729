"""`kvcore conform`: the conformance kit over one backend, several, or all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.devices import device_facts
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.testing.cases.outcome import CellResult


def take_backends(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The names after ``backend=``, and the other overrides.

    Raises:
        ConfigError: ``backend=`` is given twice, or names nothing.
    """
    given = [o for o in overrides if o.startswith("backend=")]
    rest = [o for o in overrides if not o.startswith("backend=")]
    if not given:
        return ("all",), rest
    text = given[0].partition("=")[2].strip("'\"[] ")
    names = tuple(name.strip() for name in text.split(","))
    if len(given) > 1 or not all(names):
        raise ConfigError(
            "name the backends once, with commas between them",
            field="backend",
            got=" ".join(given),
            allowed="backend=NAME, backend=A,B or backend=all",
        )
    return names, rest


def execute(job: Job) -> Result:
    """Run; status 1 when a case failed."""
    from kvcore.testing.report.conform import conform  # late: loads torch when it runs
    from kvcore.testing.report.html import page
    from kvcore.testing.report.table import text

    config = job.composed.config
    facts = device_facts(config.device)
    if not facts.present:
        raise ConfigError(
            "the kit runs kernels: it needs a device that is here",
            field="device",
            got=config.device.preset,
            allowed="auto, cpu or cuda",
        )
    where = {f.name: getattr(config.where, f.name) for f in fields(config.where)}
    names = "all" if job.backends in (("all",), ("auto",)) else list(job.backends)
    progress = _Progress()
    done = conform(
        names,
        level=config.level,
        where={axis: value for axis, value in where.items() if value is not None},
        options=config.backends,
        facts=facts,
        registry=job.registry,
        report=progress.show,
    )
    progress.end()
    if config.html is not None:
        _write(config.html, page(done))
    return Result(done.as_dict(), text(done), NO if done.failed else DONE)


def _write(path: str, content: str) -> None:
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error.strerror}",
            field="html",
            got=path,
            allowed="a file in an existing folder",
        ) from error


class _Progress:
    """One line on standard error that says where the run is; nothing where nobody watches."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._count = 0

    def show(self, result: CellResult) -> None:
        """Count one result."""
        self._count += 1
        if self._watched and self._count % 5 == 0:
            line = f"{self._count} cases, {result.backend} {result.case.id}"
            print(f"\r\x1b[2K{line[:100]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._watched:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
