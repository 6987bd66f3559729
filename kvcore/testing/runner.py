"""Runs cases against a backend; whatever the backend does, every case ends as an outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcore.attention.query import AttentionQuery
from kvcore.attention.spec import API_VERSION, BackendSpec, DeviceFacts
from kvcore.errors import BackendUnsupportedError, ConfigError, KVCoreError
from kvcore.registry.choice import BackendChoice
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry, told
from kvcore.registry.select import choose_backends
from kvcore.spec.cache_spec import CacheId
from kvcore.testing.base import find_base, here, switch_on
from kvcore.testing.cases import AXES, Case
from kvcore.testing.catalogue import cases as catalogue
from kvcore.testing.outcome import CellResult, CheckFailure, Refused
from kvcore.testing.planning import Place, layout_options

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
        report: Told of each result as it comes.

    Returns:
        One result a case. Cases for a layout that the backend does not have are left out.

    Raises:
        KVCoreError: The backend is not installed, or an axis does not exist. Never for what a backend does.
    """
    spec = installed().backend(backend) if isinstance(backend, str) else backend
    check_where(where or {})
    found: list[CellResult] = []
    for result in _cells(spec, cases, level, dict(where or {}), options, facts or here(), probe_refused):
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


def _cells(
    spec: type[BackendSpec], cases: Sequence[Case] | None, level: str, where: dict[str, str], options: Any,
    facts: DeviceFacts, probe: bool,
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
        if cases is None:
            base = find_base(place)
            cases = [c for c in catalogue(level, base) if c.matches(where)]
    except Exception as error:
        yield CellResult(CONTRACT, name, "failed", "device", f"the declaration raised {_told(error)}")
        return
    from kvcore.testing.cell import Cell

    cell = Cell(place, rung, probe)
    for case in cases:
        if missing is not None and case.level != "L0":
            yield CellResult(case, name, "skipped", rung, missing)
        elif _applies(case, place):
            yield cell.run(case)


def _applies(case: Case, place: Place) -> bool:
    """Whether the backend has a layout of the case's number."""
    if case.layout == 0:
        return True
    try:
        return case.layout < len(layout_options(case, case.cache_spec(), place))
    except Exception:
        return True  # the case itself will say what is wrong


def timed(action: Callable[[], CellResult]) -> CellResult:
    """The result with its wall time."""
    begun = time.perf_counter()
    result = action()
    return replace(result, seconds=time.perf_counter() - begun)


def seen_to_refuse(place: Place, case: Case, queries: Sequence[AttentionQuery]) -> None:
    """The refusal happens where an engine asks, before anything is made.

    Raises:
        CheckFailure: Selection takes the backend all the same.
    """
    registry = Registry()
    registry.backends[place.spec.name] = place.spec
    specs = [case.cache_spec()] + ([case.beside().cache_spec()] if case.neighbour else [])
    caches = {CacheId(i): s for i, s in enumerate(specs)}
    asked = {CacheId(i): q for i, q in enumerate(queries)}
    choice = BackendChoice(place.spec.name, options={place.spec.name: place.options})
    try:
        choose_backends(
            caches, asked, place.facts, choice, registry, purpose="plan", block_size=case.block_size,
            block_first_only=case.placement == "packed",
        )  # fmt: skip
    except BackendUnsupportedError:
        return
    except KVCoreError as error:
        raise CheckFailure(f"refused, but not as BackendUnsupportedError: {error}") from error
    raise CheckFailure("declared unsupported, but selection takes the backend")


def _told(error: BaseException) -> str:
    """An exception in one line, with the innermost place in the backend's code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return told(error)
    last = frames[-1]
    name = last.filename.replace("\\", "/").rsplit("/", 2)
    return f"{told(error)[:300]} (in {last.name}, {'/'.join(name[-2:])}:{last.lineno})"


raised = _told
__all__ = ["Refused", "check_where", "raised", "run", "seen_to_refuse", "timed"]
