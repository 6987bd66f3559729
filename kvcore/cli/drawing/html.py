"""The picture as a page of its own, with the offsets of every field as a table below it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvcore.cli.drawing.scene import Row
from kvcore.cli.drawing.svg import svg
from kvcore.plan.config import KVCacheConfig

STYLE = """
body { margin: 0 auto; max-width: 1248px; font: 14px/1.5 system-ui, sans-serif; color: #1c232b; background: #ffffff; }
svg { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin: 24px; font: 12px ui-monospace, Menlo, Consolas, monospace; }
td, th { text-align: right; padding: 2px 10px; border-bottom: 1px solid #dfe5ec; }
td:nth-child(-n + 3), th:nth-child(-n + 3) { text-align: left; }
"""


def html(rows: Sequence[Row], title: str, config: KVCacheConfig) -> str:
    """One HTML document; needs nothing else."""
    lines = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        svg(rows, title),
        "<table><thead><tr><th>cache</th><th>group</th><th>field</th><th>dtype</th><th>offset in the arena</th>"
        "<th>bytes from block to block</th><th>shape</th></tr></thead><tbody>",
    ]
    for group in config.kv_cache_groups:
        for cache in (*group.cache_ids, *group.shared):
            for view in config.field_views(cache):
                owner = f" (reads {group.shared[cache]})" if cache in group.shared else ""
                cells = [f"{cache}{owner}", f"{group.index} {group.spec.kind}", view.name, view.dtype]
                cells += [str(view.offset), str(view.strides[0]), str(list(view.shape))]
                lines.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    return "\n".join([*lines, "</tbody></table></body></html>"]) + "\n"
