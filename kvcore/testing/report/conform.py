"""One run over several backends: `conform`, its counts, its matrix and its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcore.attention.declaration import DeviceFacts
from kvcore.errors import BackendUnavailableError, ConfigError
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.testing.cases.case import AXES, Case
from kvcore.testing.cases.outcome import OUTCOMES, PROOFS, PROVEN, CellResult, Outcome
from kvcore.testing.checks.runner import Report, check_where, nothing_selected, run
from kvcore.testing.report import reproducer

NOT_LOADED = Case("L0.contract", "L0", "contract")
# The worst says most: one failure spoils a value, one pass proves that it is served.
_ORDER: tuple[Outcome, ...] = ("failed", "passed", "unsupported", "skipped")


@dataclass(frozen=True)
class MatrixCell:
    """One value of one feature on one backend.

    Attributes:
        feature, value: The axis and its value.
        backend: The backend.
        outcome: The worst of its cases, where a pass outweighs a refusal of another feature.
        proof: The weakest proof of the cases that passed, else of all.
        cases: How many cases stand behind it.
    """

    feature: str
    value: str
    backend: str
    outcome: Outcome
    proof: str
    cases: int

    @property
    def proven(self) -> bool:
        """Whether it passed with a proof that counts."""
        return self.outcome == "passed" and self.proof in PROVEN

    def as_dict(self) -> dict[str, Any]:
        """The entry of `matrix`."""
        return {**asdict(self), "proven": self.proven}


@dataclass
class Conformance:
    """All results of a run.

    Attributes:
        level: quick or full.
        backends: Names, in the order in which they ran.
        results: Every cell.
        reproducer: Python for the smallest failing case, or None.
    """

    level: str
    backends: list[str]
    results: list[CellResult] = field(default_factory=list)
    reproducer: str | None = None

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
        found: dict[tuple[str, str, str], list[CellResult]] = {}
        for result in self.results:
            features = {"level": result.case.level} | result.case.axes()
            for name, value in features.items():
                found.setdefault((name, _shown(value), result.backend), []).append(result)
        order = {name: i for i, name in enumerate(("level", *AXES))}
        rows = sorted(found.items(), key=lambda item: (order[item[0][0]], _natural(item[0][1])))
        return [_cell(*key, results) for key, results in rows]

    def as_dict(self) -> dict[str, Any]:
        """The JSON document of `kvcore conform`."""
        return {
            "level": self.level,
            "summary": self.summary(),
            "backends": [
                {
                    "name": name,
                    "proof": sorted({r.proof for r in self.of(name) if r.outcome != "skipped"}, key=PROOFS.index),
                    "summary": self.summary(name),
                    "reason": self._reason(name),
                }
                for name in self.backends
            ],
            "matrix": [cell.as_dict() for cell in self.matrix()],
            "cases": [result.as_dict() for result in self.results],
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
    report: Report | None = None,
) -> Conformance:
    """Run the kit over several backends.

    Args:
        backends: Names, or ``all``: every registered backend, and those whose plugin cannot be loaded.
        level: ``quick`` or ``full``.
        where: Axis values that a case must have.
        options: Options by backend name.
        facts: The device; None is the one of this machine.
        registry: The plugins; None is what is installed.
        report: Told of each result as it comes.

    Raises:
        UnknownBackendError: Nobody declares a name.
        ConfigError: An axis or level does not exist, or no case has the values asked for.
        BackendUnavailableError: No case could run at all.
    """
    registry = registry or installed()
    check_where(where or {})
    if level not in ("quick", "full"):
        raise ConfigError("there is no such level", field="level", got=level, allowed=("quick", "full"))
    broken = _broken(registry)
    names = sorted({*registry.backends, *broken}) if backends == "all" else _names(backends)
    done = Conformance(level, names)
    for name in names:
        if name in broken:
            outcome, reason = broken[name]
            results = [CellResult(NOT_LOADED, name, outcome, "device", reason)]
            for result in results if report is not None else ():
                report(result)  # type: ignore[misc]
        else:
            spec = registry.backend(name)
            mine = (options or {}).get(name)
            results = run(spec, level=level, where=where, options=mine, facts=facts, report=report)
        done.results += results
    _something_ran(done, where or {})
    _reproduce(done, registry, options or {}, facts)
    return done


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
    if not done.failed:
        return
    worst = reproducer.smallest(done.failed)
    spec, mine = registry.backends.get(worst.backend), options.get(worst.backend)

    def fails(case: Case) -> bool:
        again = run(spec or worst.backend, [case], options=mine, facts=facts)
        return any(r.outcome == "failed" for r in again)

    smaller = reproducer.shrink(worst.case, fails)
    done.reproducer = reproducer.source(worst, smaller, spec=spec, options=mine, facts=facts)


def _cell(feature: str, value: str, backend: str, results: Sequence[CellResult]) -> MatrixCell:
    outcome = next(o for o in _ORDER if any(r.outcome == o for r in results))
    proofs = [r.proof for r in results if r.outcome == outcome]
    return MatrixCell(feature, value, backend, outcome, max(proofs, key=PROOFS.index), len(results))


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
