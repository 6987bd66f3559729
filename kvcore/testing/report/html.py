"""The cross-backend matrix as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvcore.testing.cases.outcome import DECLARED, OUTCOMES, CellResult
from kvcore.testing.report.conform import Conformance
from kvcore.testing.report.matrix import LEVEL, MatrixCell, by_cell, is_size
from kvcore.testing.report.table import mark

_STYLE = """
:root { --line: #d9dee4; --soft: #5c6773; --pass: #d8f0dc; --weak: #edf3d4; --fail: #ffd9d6; --none: #f6f7f9 }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 80rem; padding: 1.5rem 2rem 6rem;
       color: #1d2329 }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
p, ul { margin: .4rem 0 } .soft, small { color: var(--soft) } small { font-size: .8em }
table { border-collapse: separate; border-spacing: 0; margin: .5rem 0 }
th, td { border: 1px solid var(--line); border-width: 0 1px 1px 0; padding: .28rem .7rem; text-align: left;
         vertical-align: top; white-space: nowrap }
tr > :first-child { border-left-width: 1px } thead th { border-top-width: 1px; background: #eef1f4 }
.matrix thead th { position: sticky; top: 0; z-index: 1 }
.matrix tbody th { background: #fafbfc; font-weight: 600 } .matrix tbody td.value { font-variant-numeric: tabular-nums }
.matrix tr.section th { background: #e3e8ed; letter-spacing: .03em; padding-top: .5rem }
td.n { text-align: right; font-variant-numeric: tabular-nums } td.why { white-space: normal; min-width: 24rem }
.passed { background: var(--pass) } .unproven { background: var(--weak) } .failed { background: var(--fail) }
.unsupported, .skipped, .declared { background: var(--none); color: var(--soft) }
.failed summary, .failed a { color: #9b1c13; font-weight: 600; cursor: pointer }
.failed details a { display: block; font-weight: 400; font-size: .85em }
.key span { display: inline-block; margin: 0 .4rem .25rem 0; padding: .1rem .5rem; border: 1px solid var(--line) }
article { border: 1px solid var(--line); border-left: 4px solid #d0483c; padding: .6rem 1rem; margin: .8rem 0;
          scroll-margin-top: 1rem } article:target { background: #fff7e0 } article h3 { font-size: 1rem; margin: 0 }
pre { background: #f3f5f7; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; margin: .5rem 0 0 }
"""
_KEY = (
    ("passed", "right, and our kernels ran"),
    ("unproven", "right, but emulated or on the host: not proven"),
    ("failed", "wrong: click for the cases"),
    ("unsupported", "declared unsupported, and seen to be refused"),
    ("declared", "declared only: library or device is missing, no kernel ran"),
)


def page(done: Conformance) -> str:
    """The whole page."""
    over = f", content {escape(done.content)}" if done.content else ""
    key = "".join(f'<span class="{kind}">{escape(words)}</span>' for kind, words in _KEY)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>kvcore conformance</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Conformance of attention backends</h1><p class=soft>level {escape(done.level)}{over}</p>",
        _summary(done),
        "<h2>Features and sizes</h2>",
        "<p class=soft>A cell counts the cases that have the value: passed of all, and the proof of a pass.</p>",
        f"<p class=key>{key}</p>",
        _matrix(done),
        _failures(done),
        _not_passed(done),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _summary(done: Conformance) -> str:
    """Per backend: counts, proof, and what may not be concluded."""
    heads = "".join(f"<th>{o}</th>" for o in OUTCOMES)
    rows = []
    for name in done.backends:
        counts = "".join(f"<td class=n>{n}</td>" for n in done.summary(name).values())
        seconds = sum(r.seconds for r in done.of(name))
        why = "<br>".join(escape(_sentence(what)) for what in done.unproven.get(name, []))
        proof = escape(", ".join(_proof(p) for p in done.proof(name)))
        rows.append(
            f"<tr><th>{escape(name)}</th><td>{proof}</td>{counts}<td class=n>{seconds:.1f} s</td>"
            f"<td class=why>{why}</td></tr>"
        )
    head = f"<tr><th>backend</th><th>proof</th>{heads}<th>time</th><th>not proven</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _matrix(done: Conformance) -> str:
    """Levels, features and sizes down, backends across."""
    cells = {(c.feature, c.value, c.backend): c for c in done.matrix()}
    behind = by_cell(done.results)
    values: dict[str, list[str]] = {}
    for feature, value, _ in cells:
        if value not in values.setdefault(feature, []):
            values[feature].append(value)
    sections = {"Levels": [LEVEL], "Features": [], "Sizes": []}
    for feature, found in values.items():
        if feature != LEVEL:
            sections["Sizes" if is_size(found) else "Features"].append(feature)
    numbers = {(r.backend, r.case.id): i for i, r in enumerate(done.failed)}
    rows = []
    for section, features in sections.items():
        rows.append(f'<tr class=section><th colspan="{2 + len(done.backends)}">{section}</th></tr>')
        for feature in features:
            for i, value in enumerate(values.get(feature, [])):
                first = f'<th rowspan="{len(values[feature])}">{escape(feature)}</th>' if i == 0 else ""
                marks = "".join(
                    _cell(cells[key], behind[key], numbers) if key in cells else _blank(done, *key)
                    for key in ((feature, value, name) for name in done.backends)
                )
                rows.append(f"<tr>{first}<td class=value>{escape(value)}</td>{marks}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in done.backends)
    head = f"<thead><tr><th>axis</th><th>value</th>{heads}</tr></thead>"
    return f"<table class=matrix>{head}<tbody>{''.join(rows)}</tbody></table>"


def _blank(done: Conformance, feature: str, value: str, backend: str) -> str:
    left = value in done.unasked.get(backend, {}).get(feature, [])
    return '<td class="unsupported">not asked</td>' if left else "<td></td>"


def _cell(cell: MatrixCell, results: Sequence[CellResult], numbers: dict[tuple[str, str], int]) -> str:
    kind: str = cell.outcome if cell.proven or cell.outcome != "passed" else "unproven"
    title = ", ".join(f"{n} {outcome}" for outcome, n in cell.counts.items() if n)
    if cell.outcome == "failed":
        links = [
            f'<a href="#f{numbers[r.backend, r.case.id]}">{escape(r.case.id)}</a>'
            for r in results
            if r.outcome == "failed"
        ]
        what = f"{len(links)} failed <small>of {cell.cases}</small>"
        inside = f"<details><summary>{what}</summary>{''.join(links)}</details>"
    elif cell.proof == DECLARED:
        kind, inside = "declared", "declared only"
    elif cell.outcome == "passed":
        inside = f"{cell.counts['passed']} <small>of {cell.cases}, {_proof(cell.proof)}</small>"
    else:
        inside = f"{'refused' if cell.outcome == 'unsupported' else mark(cell)} <small>{cell.cases}</small>"
    return f'<td class="{kind}" title="{title}">{inside}</td>'


def _failures(done: Conformance) -> str:
    """Every failing case with its reason and the script that runs it again."""
    if not done.failed:
        return ""
    found = [f"<h2>{len(done.failed)} cases that fail</h2>"]
    for i, result in enumerate(done.failed):
        script = done.scripts.get((result.backend, result.case.id))
        pasted = f"<pre>{escape(script)}</pre>" if script else ""
        smallest = " <small>the smallest</small>" if script and script == done.reproducer else ""
        found.append(
            f'<article id="f{i}"><h3>{escape(result.backend)}: {escape(result.case.id)}{smallest}</h3>'
            f"<p>{escape(str(result.reason))}</p>{pasted}</article>"
        )
    return "\n".join(found)


def _not_passed(done: Conformance) -> str:
    """What was refused or could not run, by reason."""
    reasons: dict[tuple[str, str, str], list[CellResult]] = {}
    for r in done.results:
        if r.outcome in ("unsupported", "skipped"):
            reasons.setdefault((r.backend, r.outcome, str(r.reason)), []).append(r)
    if not reasons:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{outcome}</td><td class=n>{len(found)}</td>"
        f"<td>{escape(found[0].case.id)}</td><td class=why>{escape(why)}</td></tr>"
        for (name, outcome, why), found in reasons.items()
    )
    head = "<tr><th>backend</th><th>outcome</th><th>cases</th><th>such as</th><th>reason</th></tr>"
    return f"<h2>Refused, and not run</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _proof(proof: str) -> str:
    return "declared only" if proof == DECLARED else proof


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
