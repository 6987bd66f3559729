"""Is a core profile served? Judged by how the cases of the profiles end, never by the declaration alone.

Level 0 asks whether a profile is declared. A backend can declare one and refuse all of its cases later, by
block sizes, by a plan that does not work out, or by another answer than before: every case is then
"unsupported", nothing fails, and nothing was shown.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.testing.cases.base import find_base
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.catalogue import all_cases
from kvcore.testing.cases.outcome import CellResult, Outcome
from kvcore.testing.cases.planning import Place

PROFILE = Case("L0.profile_served", "L0", "profile_served")


def profile_cases(place: Place) -> dict[str, list[Case]]:
    """The cases of every core profile."""
    found: dict[str, list[Case]] = {}
    for case in all_cases("quick", find_base(place), ("L2",)):
        if case.profile:
            found.setdefault(case.profile, []).append(case)
    return found


def profile_served(place: Place, end: Callable[[Case], CellResult]) -> tuple[Outcome, str | None]:
    """Whether no case of some profile is refused; a case that fails says so itself.

    Args:
        place: The backend.
        end: How a case ends.

    Returns:
        Passed, or failed and the first refusal of each profile.
    """
    refusals = []
    for profile, cases in profile_cases(place).items():
        refused = next((r for r in map(end, cases) if r.outcome not in ("passed", "failed")), None)
        if refused is None:
            return "passed", None
        refusals.append(f"{profile}: {refused.case.id} is {refused.outcome}, {refused.reason}")
    return "failed", "no core profile is served; " + "; ".join(refusals)
