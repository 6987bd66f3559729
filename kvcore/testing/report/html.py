"""The cross-backend matrix as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from kvcore.testing.report.conform import Conformance, MatrixCell
from kvcore.testing.report.table import mark

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
       color: #1c1c1c; background: #fff }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border: 1px solid #d5d5d5; padding: .25rem .7rem; text-align: left; vertical-align: top }
thead th { position: sticky; top: 0; background: #f4f4f4 }
.passed { background: #dcf3dc } .unproven { background: #eef3dc }
.failed { background: #f8d0d0; font-weight: 600 }
.unsupported { color: #777 } .skipped { color: #777; font-style: italic }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
"""


def page(done: Conformance) -> str:
    """The whole page."""
    counts = "".join(
        f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{n}</td>" for n in done.summary(name).values()) + "</tr>"
        for name in done.backends
    )
    heads = "".join(f"<th>{o}</th>" for o in done.summary())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>kvcore conformance</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Conformance of attention backends, level {escape(done.level)}</h1>",
        f"<table><thead><tr><th>backend</th>{heads}</tr></thead><tbody>{counts}</tbody></table>",
        "<p>A pass on a device or in an interpreter is proven; host and emulated runs are not. "
        "Unsupported means declared, and seen to be refused before a kernel runs.</p>",
        _matrix(done),
        _failures(done),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _matrix(done: Conformance) -> str:
    cells = {(c.feature, c.value, c.backend): c for c in done.matrix()}
    heads = "".join(f"<th>{escape(name)}</th>" for name in done.backends)
    rows = []
    for feature, value in dict.fromkeys((f, v) for f, v, _ in cells):
        marks = "".join(_cell(cells.get((feature, value, b))) for b in done.backends)
        rows.append(f"<tr><td>{escape(feature)}</td><td>{escape(value)}</td>{marks}</tr>")
    head = f"<thead><tr><th>feature</th><th>value</th>{heads}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cell(cell: MatrixCell | None) -> str:
    if cell is None:
        return "<td></td>"
    kind = cell.outcome if cell.proven or cell.outcome != "passed" else "unproven"
    return f'<td class="{kind}" title="{cell.cases} cases, proof: {cell.proof}">{escape(mark(cell))}</td>'


def _failures(done: Conformance) -> str:
    notes = [(r.backend, r.case.id, r.outcome, r.reason) for r in done.results if r.outcome != "passed"]
    rows = "".join(
        f'<tr><td>{escape(b)}</td><td>{escape(i)}</td><td class="{o}">{o}</td><td>{escape(str(why))}</td></tr>'
        for b, i, o, why in notes
    )
    parts = [
        "<h2>Not passed</h2><table><thead><tr>"
        "<th>backend</th><th>case</th><th>outcome</th><th>reason</th></tr>"
        f"</thead><tbody>{rows}</tbody></table>"
    ]
    if done.reproducer:
        parts.append(f"<h2>The smallest failing case</h2><pre>{escape(done.reproducer)}</pre>")
    return "\n".join(parts)
