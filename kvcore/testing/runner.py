"""Runs cases against a backend; whatever the backend does, every case ends as an outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvcore.attention.spec import API_VERSION, BackendSpec, DeviceFacts
from kvcore.errors import ConfigError
from kvcore.registry.loader import installed
from kvcore.testing.base import find_base, here, switch_on
from kvcore.testing.cases import AXES, Case
from kvcore.testing.catalogue import all_cases
from kvcore.testing.cell import Cell
from kvcore.testing.outcome import CellResult
from kvcore.testing.planning import Place, layout_options
from kvcore.testing.refusal import raised

Report = Callable[[CellResult], None]
CONTRACT = Case("L0.contract", "L0", "contract")


def run(
    backend: str | type[BackendSpec],
    cases: Sequence[Case] | None = None,
    *,
    level: str = "quick",
    where: Mapping[str, str] | None = None,
    options: Any = None,
    facts: DeviceFacts | None = None,
    stop_at_first: bool = False,
    probe_refused: bool = True,
    max_cost: int | None = None,
    report: Report | None = None,
) -> list[CellResult]:
    """Run the kit against one backend.

    Args:
        backend: A declaration, or the name of an installed one.
        cases: Which cases; None takes the catalogue, written against the plainest problem it accepts.
        level: ``quick`` or ``full``, where `cases` is None.
        where: Axis values that a case must have, where `cases` is None.
        options: An instance of its `Config`; None is the default. Stand-ins are switched on by themselves
            where the device is missing.
        facts: The device; None is the one of this machine.
        stop_at_first: Stop at the first failure.
        probe_refused: Run refused cases as well (on a CPU only), to report what is understated.
        max_cost: Leave out cases above this `Case.cost`, for interpreters; level 0 always runs.
        report: Told of each result as it comes.

    Returns:
        One result a case. Cases for a layout that the backend does not have are left out.

    Raises:
        KVCoreError: The backend is not installed, or an axis does not exist. Never for what a backend does.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    check_where(where or {})
    found: list[CellResult] = []
    asked = (cases, level, dict(where or {}), options, facts or here(), probe_refused, max_cost)
    for result in _cells(spec, *asked):
        found.append(result)
        if report is not None:
            report(result)
        if stop_at_first and result.outcome == "failed":
            break
    return found


def check_where(where: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an axis that does not exist."""
    for axis in where:
        if axis not in AXES:
            raise ConfigError(f"there is no axis {axis}", field=f"where.{axis}", got=axis, allowed=AXES)


def selected(
    backend: str | type[BackendSpec],
    *,
    level: str = "quick",
    where: Mapping[str, str] | None = None,
    options: Any = None,
    facts: DeviceFacts | None = None,
) -> list[Case]:
    """The cases that `run` would take from the catalogue; runs none.

    A backend that cannot even be asked has one case, which fails when it is run.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    check_where(where or {})
    try:
        place, _ = switch_on(spec, spec.Config() if options is None else options, facts or here())
        return _catalogue(place, level, dict(where or {}))
    except Exception:
        return [CONTRACT]


def _catalogue(place: Place, level: str, where: dict[str, str]) -> list[Case]:
    found = [c for c in all_cases(level, find_base(place)) if c.matches(where)]
    return [c for c in found if _applies(c, place)]


def _cells(
    spec: type[BackendSpec], cases: Sequence[Case] | None, level: str, where: dict[str, str], options: Any,
    facts: DeviceFacts, probe: bool, max_cost: int | None,
) -> Iterator[CellResult]:  # fmt: skip
    name = str(getattr(spec, "name", spec))
    version = getattr(spec, "api_version", None)
    if version != API_VERSION:
        # Nothing else can be asked: another version may have other methods.
        reason = f"backend {name} speaks contract version {version}, this core speaks {API_VERSION}"
        yield CellResult(CONTRACT, name, "failed", "device", reason)
        return
    try:
        place, missing = switch_on(spec, spec.Config() if options is None else options, facts)
        rung = spec.rung(place.options, facts)
        chosen = (
            _catalogue(place, level, where) if cases is None else [c for c in cases if _applies(c, place)]
        )
    except Exception as error:
        yield CellResult(CONTRACT, name, "failed", "device", f"the declaration raised {raised(error)}")
        return
    cell = Cell(place, rung, probe)
    for case in chosen:
        if max_cost is not None and case.cost > max_cost:
            continue
        if missing is not None and case.level != "L0":
            yield CellResult(case, name, "skipped", rung, missing)
        else:
            yield cell.run(case)


def _applies(case: Case, place: Place) -> bool:
    """Whether the backend has a layout of the case's number."""
    if case.layout == 0:
        return True
    try:
        return case.layout < len(layout_options(case, case.cache_spec(), place))
    except Exception:
        return True  # the case itself will say what is wrong
