"""A scene as SVG: every area as wide as its bytes, its place on hover, padding hatched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kvcore.cli.drawing.scene import Area, Row
from kvcore.plan.explain import size

WIDTH, MARGIN = 1200, 24
STRIP, TITLE, GAP = 30, 22, 20
LETTER = 6.6  # width of a letter of 11 px
# Hues of the groups, told apart by people who do not see red from green; fields of a group take turns in lightness.
HUES = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#66ccee", "#bbaa22", "#7766cc", "#999933")
PLAIN = {"tensor": "#dfe5ec", "block": "#eef1f5", "null": "#555c66", "step": "#fff2b3", "left": "#ffffff"}
TAKE_TURNS = ("block", "page", "field")
PALE = ("1", "0.72", "0.5", "0.85")
LEGEND = (("padding", "padding"), ("null", "null block"), ("step", "kept for a step"), ("left", "left over"))

HINT = "a colour for each group; every row has a scale of its own; point at an area for its bytes"

STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1c232b; }
text.title { font-size: 13px; font-weight: 600; }
text.in { pointer-events: none; text-anchor: middle; }
text.light { fill: #ffffff; }
rect.area { stroke: #2b333c; stroke-width: 0.6; vector-effect: non-scaling-stroke; }
rect.area:hover { stroke-width: 2.5; }
"""


def svg(rows: Sequence[Row], title: str) -> str:
    """One SVG document.

    Args:
        rows: What is drawn, from above.
        title: Of the whole picture.
    """
    body: list[str] = []
    y = MARGIN + 2 * TITLE
    for number, row in enumerate(rows):
        body.append(f'<text class="title" x="{MARGIN}" y="{y + 14}">{escape(row.title)}</text>')
        y += TITLE
        for strip in row.strips:
            body += _strip(row, number, strip, y)
            y += STRIP
        body.append(f'<text x="{MARGIN}" y="{y + 13}">0</text>')
        end = f"{row.nbytes} bytes ({size(row.nbytes)})"
        body.append(f'<text x="{MARGIN + WIDTH}" y="{y + 13}" text-anchor="end">{end}</text>')
        y += GAP + 14
    full, height = WIDTH + 2 * MARGIN, y + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {height}" width="{full}" height="{height}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        '<defs><pattern id="padding" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="7" height="7" fill="#f7c6c5"/><rect width="3" height="7" fill="#d1495b"/></pattern></defs>',
        f'<rect width="{full}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN}">{escape(title)}</text>',
        *_legend(),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x, y = MARGIN, MARGIN + 10
    for kind, word in LEGEND:
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_fill(kind)}" stroke="#2b333c" stroke-width="0.6"/>'
        yield f'<text x="{x + 20}" y="{y + 11}">{word}</text>'
        x += 40 + round(LETTER * len(word))
    yield f'<text x="{x}" y="{y + 11}">{HINT}</text>'


def _strip(row: Row, number: int, strip: Sequence[Area], y: int) -> Iterator[str]:
    done, fields = 0, 0
    for area in strip:
        x, width = MARGIN + WIDTH * done / row.nbytes, WIDTH * area.nbytes / row.nbytes
        fill, pale = _fill(area.kind), "1"
        if area.group is not None and area.kind != "padding":
            fill = HUES[area.group % len(HUES)]
            pale = PALE[fields % len(PALE)] if area.kind in TAKE_TURNS else "1"
            fields += 1
        yield (
            f'<rect class="area" x="{x:.3f}" y="{y}" width="{width:.3f}" height="{STRIP - 4}" fill="{fill}" '
            f'fill-opacity="{pale}" data-row="{number}" data-kind="{area.kind}" data-bytes="{area.nbytes}">'
            f"<title>{escape(_said(row, area))}</title></rect>"
        )
        label = next((w for w in (area.label, area.label.partition(".")[0]) if LETTER * len(w) + 6 < width), "")
        if label:
            light = " light" if area.kind == "null" or (area.group is not None and pale == "1") else ""
            yield f'<text class="in{light}" x="{x + width / 2:.1f}" y="{y + 17}">{escape(label)}</text>'
        done += area.nbytes


def _fill(kind: str) -> str:
    return "url(#padding)" if kind in ("padding", "begun", "between") else PLAIN.get(kind, "#dfe5ec")


def _said(row: Row, area: Area) -> str:
    """What hovering says: what it is, how many bytes, and where."""
    words = [area.note or area.label, f"{area.nbytes} bytes ({size(area.nbytes)})"]
    if area.offset is not None:
        words.append(f"offset {area.offset}")
        if row.origin:
            words.append(f"{row.origin + area.offset} in the arena")
    return ", ".join(words)
