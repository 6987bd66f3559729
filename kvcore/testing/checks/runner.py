"""Runs cases against a backend; whatever the backend does, every case ends as an outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import BackendError, ConfigError
from kvcore.registry.loader import installed
from kvcore.spec.content import Content
from kvcore.testing.cases.answers import timed
from kvcore.testing.cases.base import content_refused, find_base, here, open_backend
from kvcore.testing.cases.case import AXES, Case
from kvcore.testing.cases.catalogue import all_cases
from kvcore.testing.cases.outcome import CellResult, Outcome
from kvcore.testing.cases.own_content import over
from kvcore.testing.cases.planning import Target, layout_options
from kvcore.testing.checks.cell import Cell

Report = Callable[[CellResult], None]
CONTRACT = Case("L0.contract", "L0", "contract")
CONTENT = Case("L0.content", "L0", "content")
# Is a core profile served? Judged by how the cases of the profiles end. Level 0 asks whether one is declared, but a
# backend can declare it and refuse all of its cases later, by block sizes, by a plan that does not work out, or by
# another answer than before: every case is then "unsupported", nothing fails, and nothing was shown.
PROFILE = Case("L0.profile_served", "L0", "profile_served")


def profile_cases(target: Target) -> dict[str, list[Case]]:
    """The cases of every core profile."""
    found: dict[str, list[Case]] = {}
    for plain in all_cases("quick", find_base(target), ("L2",)):
        case = plain.storing(target.content)
        if case is not None and case.profile:
            found.setdefault(case.profile, []).append(case)
    return found


def profile_served(target: Target, end: Callable[[Case], CellResult]) -> tuple[Outcome, str | None]:
    """Whether no case of some profile is refused; a case that fails says so itself.

    Args:
        target: The backend.
        end: How a case ends.

    Returns:
        Passed, or failed and the first refusal of each profile.
    """
    refusals = []
    for profile, cases in profile_cases(target).items():
        refused = next((r for r in map(end, cases) if r.outcome not in ("passed", "failed")), None)
        if refused is None:
            return "passed", None
        refusals.append(f"{profile}: {refused.case.id} is {refused.outcome}, {refused.reason}")
    return "failed", "no core profile is served; " + "; ".join(refusals)


def run(
    backend: str | type[BackendSpec],
    cases: Sequence[Case] | None = None,
    *,
    level: str = "quick",
    where: Mapping[str, str] | None = None,
    options: Any = None,
    facts: DeviceFacts | None = None,
    content: type[Content] | None = None,
    stop_at_first: bool = False,
    probe_refused: bool = True,
    max_cost: int | None = None,
    report: Report | None = None,
) -> list[CellResult]:
    """Run the kit against one backend.

    Args:
        backend: A declaration, or the name of an installed one.
        cases: Which cases; None takes the catalogue, written against the plainest problem it accepts, and
            without `where` the case `PROFILE` after it.
        level: ``quick`` or ``full``, where `cases` is None.
        where: Axis values that a case must have, where `cases` is None.
        options: An instance of its `Config`; None is the default. Stand-ins are switched on by themselves
            where the device is missing.
        facts: The device; None is the one of this machine.
        content: A plugin's content in which the cases of the catalogue store keys and values.
        stop_at_first: Stop at the first failure.
        probe_refused: Run refused cases as well (on a CPU only), to report what is understated.
        max_cost: Leave out cases above this `Case.cost`, for interpreters; level 0 and one core profile
            always run.
        report: Told of each result as it comes.

    Returns:
        One result a case. Cases for a layout that the backend does not have are left out.

    Raises:
        KVCoreError: The backend is not installed, or an axis does not exist. Never for what a backend does.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    check_where(where or {})
    found: list[CellResult] = []
    asked = (cases, level, dict(where or {}), options, facts or here(), content, probe_refused, max_cost)
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
    content: type[Content] | None = None,
) -> list[Case]:
    """The cases that `run` would take from the catalogue; runs none.

    A backend that cannot even be asked has one case, `CONTRACT`, and asking again is what fails.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    check_where(where or {})
    try:
        target = replace(open_backend(spec, options, facts or here()).target, content=content)
        return _catalogue(target, level, dict(where or {}))
    except BackendError:
        return [CONTRACT]


def nothing_selected(where: Mapping[str, str]) -> ConfigError:
    """The error for a run without a case."""
    return ConfigError(
        "no case was selected",
        field="where",
        got=dict(where) or None,
        allowed="values that a case has",
        remedy="leave out a where.* key, or ask for level=full",
    )


def _catalogue(target: Target, level: str, where: dict[str, str]) -> list[Case]:
    base = find_base(target)
    cases = all_cases(level, base)
    if target.content is not None:
        cases = over(target.content, cases, base)
    found = [c for c in cases if c.matches(where)]
    return [c for c in found if _applies(c, target)] + ([] if where else [PROFILE])


def _cells(
    spec: type[BackendSpec],
    cases: Sequence[Case] | None,
    level: str,
    where: dict[str, str],
    options: Any,
    facts: DeviceFacts,
    content: type[Content] | None,
    probe: bool,
    max_cost: int | None,
) -> Iterator[CellResult]:
    name = str(getattr(spec, "name", spec))
    try:
        target, missing, proof = open_backend(spec, options, facts)
        target = replace(target, content=content)
        refused = None if content is None else content_refused(target)
        if refused is not None:
            yield CellResult(replace(CONTENT, stored_as=content), name, "unsupported", proof, refused)
            return
        chosen = _catalogue(target, level, where) if cases is None else [c for c in cases if _applies(c, target)]
    except BackendError as error:
        yield CellResult(CONTRACT, name, "failed", "device", error.message)
        return
    ends = _Ends(Cell(target, proof, probe), missing)
    for case in chosen:
        if max_cost is None or case.cost <= max_cost:
            yield ends.of(case)


class _Ends:
    """How cases end.

    Args:
        cell: Runs them.
        missing: Why no kernel can run here, or None.
    """

    def __init__(self, cell: Cell, missing: str | None) -> None:
        self._cell, self._missing = cell, missing
        self._ended: dict[Case, CellResult] = {}

    def of(self, case: Case) -> CellResult:
        """The result of a case; that of `PROFILE` follows from the results of others."""
        profile = case.check == PROFILE.check
        if self._missing is not None and (profile or case.level != "L0"):
            return self._cell.result(case, "skipped", self._missing)
        self._ended[case] = timed(lambda: self._profile(case)) if profile else self._cell.run(case)
        return self._ended[case]

    def _profile(self, case: Case) -> CellResult:
        try:
            return self._cell.result(case, *profile_served(self._cell.target, self._before_or_now))
        except BackendError as error:
            return self._cell.result(case, "failed", error.message)

    def _before_or_now(self, case: Case) -> CellResult:
        return self._ended[case] if case in self._ended else self.of(case)


def _applies(case: Case, target: Target) -> bool:
    """Whether the backend has a layout of the case's number."""
    if case.layout == 0:
        return True
    try:
        return case.layout < len(layout_options(case, case.cache_spec(), target))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:
        return True  # the case itself will say what is wrong
