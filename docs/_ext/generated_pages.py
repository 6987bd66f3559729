"""Writes docs/_generated/*.md from the code itself before each build, so that the pages cannot lag behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import byte_table
import families
import overview
import pages
import pictures
import support

PAGES: dict[str, Callable[[Path], str]] = {
    "bytes.md": byte_table.table,
    "families.md": families.listing,
    "overview.md": overview.overview,
    "decisions.md": pages.decisions,
    "hooks.md": pages.hooks,
    "commands.md": pages.commands,
    "keys.md": pages.keys,
    "layout.md": pictures.to_scale,
    "layouts.md": pictures.layouts,
    "placement.md": pictures.placement,
    "plan.md": pictures.smollm2,
    "models.md": pages.models,
    "support.md": support.support,
}


def write(docs: Path) -> None:
    """Write every generated part below `docs`/_generated; unchanged ones keep their time stamp."""
    folder = docs / "_generated"
    folder.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        target, text = folder / name, make(docs)
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir)))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
