"""One run over several backends: `conform`, its counts and its document."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import BackendError, BackendUnavailableError
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.spec.content import Content
from kvcore.testing.cases.base import here
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.covering import unasked
from kvcore.testing.cases.outcome import DECLARED, OUTCOMES, STRENGTH, CellResult, Outcome
from kvcore.testing.checks.runner import Report, check_level, check_where, nothing_selected, open_for, run, selected
from kvcore.testing.report import reproducer
from kvcore.testing.report.matrix import MatrixCell, matrix
from kvcore.testing.report.unproven import not_proven

NOT_LOADED = Case("L0.contract", "L0", "contract")
# How long failures are looked into, the smallest of them first.
REPRODUCING_SECONDS = 60.0


@dataclass
class Conformance:
    """All results of a run.

    Attributes:
        level: fast, quick or full.
        backends: Names, in the order in which they ran.
        content: Kind of the plugin's content in which keys and values were stored, or None.
        results: Every cell.
        reproducer: Python for the smallest failing case, or None.
        scripts: Python for every failing case, by backend and case.
        unasked: Per backend, the values of axes that were left out because they take long.
        unproven: Per backend, what may not be concluded, in sentences.
    """

    level: str
    backends: list[str]
    content: str | None = None
    results: list[CellResult] = field(default_factory=list)
    reproducer: str | None = None
    scripts: dict[tuple[str, str], str] = field(default_factory=dict)
    unasked: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    unproven: dict[str, list[str]] = field(default_factory=dict)

    def of(self, backend: str) -> list[CellResult]:
        """The cells of one backend."""
        return [r for r in self.results if r.backend == backend]

    @property
    def failed(self) -> list[CellResult]:
        """The cells that failed."""
        return [r for r in self.results if r.outcome == "failed"]

    def summary(self, backend: str | None = None) -> dict[str, int]:
        """How many cells have each outcome."""
        mine = self.results if backend is None else self.of(backend)
        return {name: sum(r.outcome == name for r in mine) for name in OUTCOMES}

    def matrix(self) -> list[MatrixCell]:
        """Feature by value by backend; beside the axes, one row a level."""
        return matrix(self.results)

    def slowest(self, count: int) -> list[CellResult]:
        """The cells that took longest, the slowest first."""
        return sorted(self.results, key=lambda r: -r.seconds)[:count]

    def proof(self, backend: str) -> list[str]:
        """The levels of proof of a backend's cells, the strongest first."""
        found = {r.proof for r in self.of(backend)}
        return sorted(found, key=STRENGTH.index)

    def as_dict(self) -> dict[str, Any]:
        """The JSON document of `kvcore conform`."""
        return {
            "level": self.level,
            "content": self.content,
            "summary": self.summary(),
            "backends": [
                {
                    "name": name,
                    "proof": self.proof(name),
                    "summary": self.summary(name),
                    "reason": self._reason(name),
                    "unasked": self.unasked.get(name, {}),
                    "not_proven": self.unproven.get(name, []),
                }
                for name in self.backends
            ],
            "matrix": [cell.as_dict() for cell in self.matrix()],
            "cases": [r.as_dict() | {"reproducer": self.scripts.get((r.backend, r.case.id))} for r in self.results],
            "reproducer": self.reproducer,
        }

    def _reason(self, name: str) -> str | None:
        """Why a backend did not run at all, or None."""
        mine = self.of(name)
        ran = any(r.outcome != "skipped" and r.case.level != "L0" for r in mine)
        return None if ran else next((r.reason for r in mine if r.reason), None)


def conform(
    backends: Sequence[str] | str,
    *,
    level: str = "quick",
    where: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    facts: DeviceFacts | None = None,
    registry: Registry | None = None,
    content: type[Content] | None = None,
    cover_slow: bool = True,
    jobs: int = 1,
    report: Report | None = None,
) -> Conformance:
    """Run the kit over several backends.

    Args:
        backends: Names, or ``all``: every registered backend, and those whose plugin cannot be loaded.
        level: ``fast``, ``quick`` or ``full``.
        where: Axis values that a case must have.
        options: Options by backend name.
        facts: The device; None is the one of this machine.
        registry: The plugins; None is what is installed.
        content: A plugin's content in which keys and values are stored.
        cover_slow: Ask backends that are interpreted or emulated a covering set alone.
        jobs: Processes.
        report: Told of each result as it comes.

    Raises:
        UnknownBackendError: Nobody declares a name.
        ConfigError: An axis or level does not exist, or no case has the values asked for.
        BackendUnavailableError: No case could run at all.
    """
    registry = registry or installed()
    check_where(where or {})
    check_level(level)
    broken = _broken(registry)
    names = sorted({*registry.backends, *broken}) if backends == "all" else _names(backends)
    done = Conformance(level, names, content=None if content is None else content.kind)
    for name in names:
        if name in broken:
            outcome, reason = broken[name]
            results = [CellResult(NOT_LOADED, name, outcome, DECLARED, reason)]
            for result in results if report is not None else ():
                report(result)  # type: ignore[misc]
            done.results += results
            continue
        spec = registry.backend(name)
        asked: dict[str, Any] = {
            "where": where,
            "options": (options or {}).get(name),
            "facts": facts,
            "content": content,
        }
        done.results += run(spec, level=level, cover_slow=cover_slow, jobs=jobs, report=report, **asked)
        _what_is_left(done, spec, registry, cover_slow, asked)
    _something_ran(done, where or {})
    _reproduce(done, registry, options or {}, facts)
    return done


def _what_is_left(
    done: Conformance, spec: type[BackendSpec], registry: Registry, cover_slow: bool, asked: dict[str, Any]
) -> None:
    """Note what was not asked of a backend, and what was not proven."""
    name = str(spec.name)
    try:
        opened = open_for(spec, asked["options"], asked["facts"] or here(), asked["content"])
    except BackendError:
        return  # it has failed already, with that reason
    chosen, whole, full = (
        [c for c in selected(spec, level=level, cover_slow=few, **asked) if c.seqs]
        for level, few in ((done.level, cover_slow), (done.level, False), ("full", False))
    )
    left = unasked(whole, chosen)
    if left:
        done.unasked[name] = left
    done.unproven[name] = not_proven(
        opened, done.of(name), left, registry, asked["content"], len({c.id for c in full} - {c.id for c in whole})
    )


def _names(backends: Sequence[str] | str) -> list[str]:
    listed = backends.split(",") if isinstance(backends, str) else list(backends)
    return list(dict.fromkeys(name.strip() for name in listed))


def _broken(registry: Registry) -> dict[str, tuple[Outcome, str]]:
    """Backends that are declared but refused fail; plugins that cannot be loaded here are skipped."""
    found: dict[str, tuple[Outcome, str]] = {name: ("failed", reason) for name, reason in registry.refused.items()}
    for record in registry.plugins:
        if record.broken and not record.provides and record.name not in registry.backends:
            found.setdefault(record.name, ("skipped", f"plugin {record.name} ({record.origin}): {record.reason}"))
    return found


def _something_ran(done: Conformance, where: Mapping[str, str]) -> None:
    if not done.results:
        raise nothing_selected(where)
    # Without `where`, a backend that refuses everything fails for want of a core profile.
    idle = ("skipped", "unsupported") if where else ("skipped",)
    if all(r.outcome in idle or (r.outcome == "passed" and r.case.level == "L0") for r in done.results):
        reason = next((r.reason for r in done.results if r.outcome in idle), None)
        raise BackendUnavailableError(
            f"no case could run: {reason}",
            field="backend",
            got=", ".join(done.backends),
            remedy="install what is missing, or choose a backend that runs here and serves what was asked "
            "for (see `kvcore backends`)",
        )


def _reproduce(done: Conformance, registry: Registry, options: Mapping[str, Any], facts: DeviceFacts | None) -> None:
    """Python for every failure; the smallest is made smaller."""
    if not done.failed:
        return
    worst, until = reproducer.smallest(done.failed), time.monotonic() + REPRODUCING_SECONDS
    for result in sorted(done.failed, key=lambda r: r is not worst):
        text = reproducer.script(
            result,
            spec=registry.backends.get(result.backend),
            options=options.get(result.backend),
            facts=facts,
            smaller=result is worst,
            seconds=until - time.monotonic(),
        )
        done.scripts[result.backend, result.case.id] = text
        if result is worst:
            done.reproducer = text
