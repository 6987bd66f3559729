"""A failure as Python to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import indent
from typing import Any

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import BackendError
from kvcore.registry.loader import installed
from kvcore.testing.cases.answers import asking
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CellResult
from kvcore.testing.checks.runner import run
from kvcore.testing.report.as_source import Source
from kvcore.testing.report.reproduction import Reproduction, reproduce


def smallest(failed: Sequence[CellResult]) -> CellResult:
    """The failed cell of the lowest level, and of those the cheapest.

    Backends that could not be asked at all come last: their reason says it all.
    """
    return min(failed, key=lambda r: (_is_contract(r.case), r.case.level, r.case.cost, r.case.tokens, r.case.id))


def script(
    result: CellResult,
    *,
    spec: type[BackendSpec] | None,
    options: Any = None,
    facts: DeviceFacts | None = None,
    smaller: bool = False,
    seconds: float = 20.0,
) -> str:
    """Python that makes one failed cell fail again, tried on a fresh instance of the backend.

    Args:
        result: The failed cell.
        spec: The declaration; None where its plugin cannot be loaded.
        options: The options that the run was given; None is the default.
        facts: The device that the run was given; None is the one of this machine.
        smaller: Whether to look for a smaller case.
        seconds: Most time.
    """

    def reasons(cases: Sequence[Case]) -> list[str | None]:
        again = run(spec or result.backend, cases, options=options, facts=facts, probe_refused=False)
        return [r.reason if r.outcome == "failed" else None for r in again]

    again = None if spec is None else reproduce(result, reasons, smaller=smaller, seconds=seconds)
    return source(result, again, spec=spec, options=options, facts=facts)


def source(
    result: CellResult,
    again: Reproduction | None = None,
    *,
    spec: type[BackendSpec] | str | None = None,
    options: Any = None,
    facts: DeviceFacts | None = None,
) -> str:
    """Python that runs one failed cell again, with the options and the content that were in use.

    Args:
        result: The failed cell.
        again: The cases that make it fail; None is the cell's own case.
        spec: The declaration or its name; None is the installed one of that name.
        options: The options that the run was given; None is the default.
        facts: The device that the run was given; None is the one of this machine.
    """
    installed_here = installed().backends
    if spec is None or isinstance(spec, str):
        spec = installed_here.get(spec or result.backend)
    text = Source()
    if spec is None:
        # The plugin was refused when it was loaded: there is no declaration to run.
        call = f"{text.take('kvcore.testing', 'conform')}({result.backend!r}).results"
        return _looped(text, "", call)
    name = getattr(spec, "name", None)
    backend = repr(name) if installed_here.get(str(name)) is spec else text.name(spec)
    words = [backend, *_circumstances(text, spec, options, facts or here())]
    text.take("kvcore.testing", "run")
    if _is_contract(result.case):
        # Nothing could be asked of it, so that there is no case: the first cell fails.
        return _looped(text, "", f"run({', '.join([*words, 'stop_at_first=True'])})")
    again = again or Reproduction((result.case,))
    given, listed = _cases(text, again.cases)
    words.insert(1, listed)
    note = f"# {again.note}\n" if again.note else ""
    return _looped(text, note + given, f"run({', '.join(words)})")


def _cases(text: Source, cases: Sequence[Case]) -> tuple[str, str]:
    """Lines that make the cases, and the list of them."""
    for needed in ("Case", "Seq") if any(c.seqs for c in cases) else ("Case",):
        text.take("kvcore.testing", needed)
    if len(cases) > 1 and len(set(cases)) == 1:
        return f"case = {cases[0].source(text.value)}\n", f"[case] * {len(cases)}"
    if len(cases) == 1:
        return f"case = {cases[0].source(text.value)}\n", "[case]"
    shown = ",\n".join(c.source(text.value) for c in cases)
    return f"cases = [\n{indent(shown, '    ')},\n]\n", "cases"


def _looped(text: Source, before: str, call: str) -> str:
    loop = f"for result in {call}:\n    print(result.outcome, result.reason)\n"
    return f"{text.imports()}\n{before}{loop}"


def _circumstances(text: Source, spec: type[BackendSpec], options: Any, facts: DeviceFacts) -> Iterator[str]:
    """The arguments `options` and `facts`, each where leaving it out would change the run."""
    try:
        with asking():
            default = spec.Config()
            used = switch_on(spec, default if options is None else options, facts)[0].options
            stands_in = any(getattr(used, name, False) for name in spec.stand_ins)
    except BackendError:
        default, used, stands_in = None, options, False  # the declaration itself is what is broken
    if used != default:
        yield f"options={text.value(used)}"
    # Pasted on a machine that has the device, a stand-in must not run there.
    asked, found = (replace(f, name="", memory_bytes=0) for f in (facts, here()))
    if stands_in or asked != found:
        yield f"facts={text.value(asked)}"


def _is_contract(case: Case) -> bool:
    return case.level == "L0" and case.check == "contract"
