"""Runs cases against a backend; whatever the backend does, every case ends as an outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import BackendError, ConfigError
from kvcore.registry.loader import installed
from kvcore.spec.content import Content
from kvcore.testing.cases.answers import timed
from kvcore.testing.cases.base import Opened, content_refused, find_base, here, open_backend
from kvcore.testing.cases.case import AXES, SIZES, Case
from kvcore.testing.cases.catalogue import all_cases
from kvcore.testing.cases.covering import BUDGETS, cover
from kvcore.testing.cases.option_sets import under_options
from kvcore.testing.cases.outcome import DECLARED, CellResult, Outcome
from kvcore.testing.cases.own_content import over
from kvcore.testing.cases.planning import Target, layout_options
from kvcore.testing.checks.cell import Cell
from kvcore.testing.checks.parallel import Recipe, in_processes

Report = Callable[[CellResult], None]
# Of backends that run on a CPU in the place of a device: slow.
STAND_IN_PROOFS = ("interpreter", "emulated")
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
    cover_slow: bool = False,
    jobs: int = 1,
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
        level: ``fast``, ``quick`` or ``full``, where `cases` is None.
        where: Axis values that a case must have, where `cases` is None.
        options: An instance of its `Config`; None is the default. Stand-ins are switched on by themselves
            where the device is missing.
        facts: The device; None is the one of this machine.
        content: A plugin's content in which the cases of the catalogue store keys and values.
        cover_slow: Of the catalogue, a covering set alone where the backend is interpreted or emulated.
        jobs: Processes; each has an instance of the backend of its own.
        stop_at_first: Stop at the first failure.
        probe_refused: Run refused cases as well (on a CPU only), to report what is understated.
        max_cost: Leave out cases above this `Case.cost`, for interpreters; level 0 and one core profile
            always run.
        report: Told of each result as it comes.

    Returns:
        One result a case. Cases for a layout that the backend does not have are left out.

    Raises:
        KVCoreError: The backend is not installed, an axis or level does not exist, or another process cannot import
            the backend. Never for what a backend does.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    choice = Choice(level, dict(where or {}), content, cover_slow)
    found: list[CellResult] = []
    for result in _cells(spec, cases, choice, options, facts or here(), jobs, probe_refused, max_cost):
        found.append(result)
        if report is not None:
            report(result)
        if stop_at_first and result.outcome == "failed":
            break
    return found


class Choice(NamedTuple):
    """Which cases of the catalogue run.

    Attributes:
        level: ``fast``, ``quick`` or ``full``.
        where: Axis values that a case must have.
        content: A plugin's content in which they store keys and values, or None.
        cover_slow: A covering set alone where the backend is interpreted or emulated.
    """

    level: str
    where: dict[str, str]
    content: type[Content] | None
    cover_slow: bool

    def of(self, opened: Opened) -> list[Case]:
        """The cases that a backend is asked.

        Raises:
            BackendError: The declaration raises.
        """
        target = opened.target
        base = find_base(target)
        cases = all_cases(self.level, base)
        if target.content is not None:
            cases = over(target.content, cases, base)
        else:
            cases += under_options(target, self.level)
        found = [c for c in cases if c.matches(self.where) and _applies(c, target)]
        if self.cover_slow and opened.proof in STAND_IN_PROOFS:
            found = cover(found, BUDGETS[self.level])
        return found + ([] if self.where else [PROFILE])


def open_for(spec: type[BackendSpec], options: Any, facts: DeviceFacts, content: type[Content] | None) -> Opened:
    """A backend that can be asked, over a content.

    Raises:
        BackendError: As `open_backend`.
    """
    opened = open_backend(spec, options, facts)
    return opened._replace(target=replace(opened.target, content=content))


def check_where(where: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an axis that does not exist."""
    for axis in where:
        if axis not in AXES:
            raise ConfigError(f"there is no axis {axis}", field=f"where.{axis}", got=axis, allowed=AXES)


def check_level(level: str) -> None:
    """Raise `ConfigError` for a level that does not exist."""
    if level not in SIZES:
        raise ConfigError("there is no such level", field="level", got=level, allowed=SIZES)


def selected(
    backend: str | type[BackendSpec],
    *,
    level: str = "quick",
    where: Mapping[str, str] | None = None,
    options: Any = None,
    facts: DeviceFacts | None = None,
    content: type[Content] | None = None,
    cover_slow: bool = False,
) -> list[Case]:
    """The cases that `run` would take from the catalogue; runs none.

    A backend that cannot even be asked has one case, `CONTRACT`, and asking again is what fails.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    check_where(where or {})
    check_level(level)
    try:
        opened = open_for(spec, options, facts or here(), content)
        return Choice(level, dict(where or {}), content, cover_slow).of(opened)
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


def _cells(
    spec: type[BackendSpec],
    cases: Sequence[Case] | None,
    choice: Choice,
    options: Any,
    facts: DeviceFacts,
    jobs: int,
    probe: bool,
    max_cost: int | None,
) -> Iterator[CellResult]:
    check_where(choice.where)
    check_level(choice.level)
    name = str(getattr(spec, "name", spec))
    try:
        opened = open_for(spec, options, facts, choice.content)
        refused = None if choice.content is None else content_refused(opened.target)
        if refused is not None:
            case = replace(CONTENT, stored_as=choice.content)
            yield CellResult(case, name, "unsupported", opened.proof, refused)
            return
        chosen = choice.of(opened) if cases is None else [c for c in cases if _applies(c, opened.target)]
    except BackendError as error:
        yield CellResult(CONTRACT, name, "failed", DECLARED, error.message)
        return
    asked = [c for c in chosen if max_cost is None or c.cost <= max_cost]
    ends = _Ends(Recipe(opened.target, opened.proof, probe), opened.missing)
    arriving = in_processes([c for c in asked if ends.runs(c)], ends.recipe, jobs) if jobs > 1 else None
    for case in asked:
        while arriving is not None and ends.runs(case) and case not in ends.arrived:
            result = next(arriving)
            ends.arrived[result.case] = result
        yield ends.of(case)


class _Ends:
    """How cases end.

    Args:
        recipe: What runs them.
        missing: Why no kernel can run here, or None.

    Attributes:
        arrived: How cases ended that another process ran.
    """

    def __init__(self, recipe: Recipe, missing: str | None) -> None:
        self.recipe = recipe
        self._cell, self._missing = Cell(*recipe), missing
        self.arrived: dict[Case, CellResult] = {}
        self._ended: dict[Case, CellResult] = {}

    def runs(self, case: Case) -> bool:
        """Whether a case has to be run to know how it ends."""
        return case.check != PROFILE.check and (self._missing is None or case.level == "L0")

    def of(self, case: Case) -> CellResult:
        """The result of a case; that of `PROFILE` follows from the results of others."""
        if self._missing is not None and not self.runs(case):
            return self._cell.result(case, "skipped", self._missing)
        if case in self.arrived:
            self._ended[case] = self.arrived.pop(case)
        else:
            self._ended[case] = self._cell.run(case) if self.runs(case) else timed(lambda: self._profile(case))
        return self._ended[case]

    def _profile(self, case: Case) -> CellResult:
        try:
            return self._cell.result(case, *profile_served(self.recipe.target, self._before_or_now))
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
