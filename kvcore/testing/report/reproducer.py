"""A failure as Python to paste, made as small as it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import BackendError
from kvcore.registry.loader import installed
from kvcore.spec.dtypes import ceil_div
from kvcore.testing.cases.answers import asking
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.cases.case import Case, Seq
from kvcore.testing.cases.outcome import CellResult
from kvcore.testing.report.as_source import Source


def smallest(failed: Sequence[CellResult]) -> CellResult:
    """The failed cell of the lowest level, and of those the cheapest.

    Backends that could not be asked at all come last: their reason says it all.
    """
    return min(failed, key=lambda r: (_is_contract(r.case), r.case.level, r.case.cost, r.case.tokens, r.case.id))


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 40) -> Case:
    """A smaller case that fails as well: fewer sequences, shorter ones, fewer heads.

    Args:
        case: A case that fails.
        fails: Runs a case.
        tries: Most cases to run.

    Returns:
        The case as it is where it has no step: it is as small as it gets.
    """
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for other in _smaller(case):
            left -= 1
            if left < 0:
                break
            if fails(other):
                case, smaller = other, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    seqs = case.seqs
    if not seqs:
        return
    if len(seqs) > 1 and not any(s.shared for s in seqs) and case.check not in ("merge", "steps"):
        for i in range(len(seqs)):
            yield replace(case, seqs=seqs[:i] + seqs[i + 1 :])
    for i, seq in enumerate(seqs):
        if seq.shared or (i + 1 < len(seqs) and seqs[i + 1].shared):
            continue
        halves = [Seq(seq.computed, ceil_div(seq.scheduled, 2)), Seq(seq.computed // 2, seq.scheduled)]
        for half in halves:
            if half != seq and (seq.computed == 0 or half.computed > 0):
                yield replace(case, seqs=(*seqs[:i], half, *seqs[i + 1 :]))
    if case.layers > 1:
        yield replace(case, layers=1)
    if case.num_kv_heads > 1:
        yield replace(case, num_kv_heads=1)


def source(
    result: CellResult,
    case: Case | None = None,
    *,
    spec: type[BackendSpec] | str | None = None,
    options: Any = None,
    facts: DeviceFacts | None = None,
) -> str:
    """Python that runs one failed cell again, with the options that were in use.

    Args:
        result: The failed cell.
        case: A smaller case in its place.
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
    words.insert(1, "[case]")
    chosen = case or result.case
    for needed in ("Case", "Seq") if chosen.seqs else ("Case",):
        text.take("kvcore.testing", needed)
    return _looped(text, f"case = {chosen.source()}\n", f"run({', '.join(words)})")


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
