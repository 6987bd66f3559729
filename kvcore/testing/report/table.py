"""The report for people: the cross-backend matrix and the failures as text."""

from __future__ import annotations

from kvcore.testing.cases.outcome import DECLARED, PROVEN
from kvcore.testing.report.conform import Conformance
from kvcore.testing.report.matrix import MatrixCell

_MARKS = {"passed": "pass", "failed": "FAIL", "unsupported": "-", "skipped": "skip"}


def text(done: Conformance, *, most_failures: int = 5, slowest: int = 0) -> str:
    """Matrix, counts, what was not proven, the first failures of each backend, reproducer.

    Args:
        done: The run.
        most_failures: Failures that are shown of each backend.
        slowest: How many of the slowest cases are listed.
    """
    over = f", content {done.content}" if done.content else ""
    lines = [f"conformance, level {done.level}{over}", "", *matrix_lines(done), ""]
    lines += ["pass: right on a device    pass(interpreter): our kernel, interpreted    -: declared unsupported,"]
    lines += ["and seen to refuse    (emulated), (host): not proven    skip: cannot run here    declared only:"]
    lines += ["library or device is missing, and no kernel ran", ""]
    for name in done.backends:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in done.summary(name).items() if n)
        seconds = sum(r.seconds for r in done.of(name))
        lines.append(f"{name}: {counts} in {seconds:.1f} s")
        reason = next((r.reason for r in done.of(name) if r.outcome == "skipped" and r.reason), None)
        if reason:
            lines.append(f"  skipped: {reason}")
        modest = [r for r in done.of(name) if r.understated]
        if modest:
            lines.append(f"  understated: {len(modest)} refused cases would be right, such as {modest[0].case.id}")
        lines += [f"  not proven: {what}" for what in done.unproven.get(name, [])]
    if slowest:
        lines += ["", "the slowest cases:"]
        lines += [f"{r.seconds:9.3f} s  {r.backend} {r.case.id}" for r in done.slowest(slowest)]
    for name in done.backends:
        failed = [r for r in done.failed if r.backend == name]
        for result in failed[:most_failures]:
            lines += ["", f"FAILED {name} {result.case.id}", f"  {result.reason}"]
        if len(failed) > most_failures:
            lines += ["", f"and {len(failed) - most_failures} more failures of {name}"]
    if done.reproducer:
        lines += ["", "the smallest failing case:", "", done.reproducer]
    return "\n".join(lines)


def mark(cell: MatrixCell) -> str:
    """A cell in a word; a pass below the device says what it proves."""
    if cell.proof == DECLARED and cell.outcome != "failed":
        return "declared only"
    if cell.outcome == "passed" and cell.proof != "device":
        return f"{'pass' if cell.proof in PROVEN else 'ran'}({cell.proof})"
    return _MARKS[cell.outcome]


def matrix_lines(done: Conformance) -> list[str]:
    """Feature and value down, backends across."""
    cells = {(c.feature, c.value, c.backend): mark(c) for c in done.matrix()}
    rows = list(dict.fromkeys((feature, value) for feature, value, _ in cells))
    width = {b: max([len(b)] + [len(m) for (_, _, x), m in cells.items() if x == b]) for b in done.backends}
    first = max([len("feature")] + [len(f) for f, _ in rows])
    second = max([len("value")] + [len(v) for _, v in rows])

    def line(a: str, b: str, rest: list[str]) -> str:
        return "  ".join([a.ljust(first), b.ljust(second), *rest]).rstrip()

    lines = [line("feature", "value", [b.ljust(width[b]) for b in done.backends])]
    last = ""
    for feature, value in rows:
        marks = [cells.get((feature, value, b), "").ljust(width[b]) for b in done.backends]
        lines.append(line("" if feature == last else feature, value, marks))
        last = feature
    return lines
