"""The two pages of the docs: what kills each mutant, and what each axis of the kit is there for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from kvcore.cli.conform import WhereKeys
from kvcore.testing import Case
from kvcore.testing.cases.case import AXES, LEVELS
from kvcore.testing.cases.extents import BOUNDS
from kvcore.testing.report.matrix import natural, shown

from .kills import Kill, plain
from .mutant import Mutant, catalogue
from .table import MUTANTS

DOCS = Path(__file__).parents[3] / "docs"
COMMAND = "python tests/conformance/mutants/matrix.py"
WRITTEN = f"<!-- written by `{COMMAND}`; do not edit -->"
MOST_VALUES = 16
# Axes whose cases are told apart by an attribute of theirs, not by the value that names them.
NUMBERS = {"window": "window", "head_dim_v": "dim_v", "gqa": "gqa"}
# What each report is about, as far as a backend is at fault.
REPORTS = {
    "A17": "any block size declared, small ones do not compile",
    "A18": "any block size declared, kernels of some missing",
    "A20": "wrong block size or table given or read, NaN from stale bytes",
    "A21": "stale bits read as NaN, 0 * NaN",
    "A25": "values outside the window not masked",
    "A26": "a feature accepted and ignored",
    "A27": "capabilities declared that are not there",
    "A29": "ALiBi crashes in one version of the kernel",
    "A30": "soft-cap accepted, not implemented",
    "A32": "queries quantized too, scales of 1 by default",
    "A33": "strides of the scale view worked out from its shape",
    "A35": "offsets beyond 2^31 in int32",
    "A36": "log-sum-exp in another convention",
    "A38": "bytes written in another layout than declared",
}


def pages(kills: Mapping[str, Kill]) -> dict[Path, str]:
    """Each page by its file."""
    return {DOCS / "mutants.md": _mutants(kills), DOCS / "axes.md": _axes(kills)}


def _mutants(kills: Mapping[str, Kill]) -> str:
    reports = ", ".join(f"{name} ({what})" for name, what in REPORTS.items())
    lines = [
        "# Mutants: does the kit kill what is broken?",
        "",
        WRITTEN,
        "",
        f"{len(MUTANTS)} broken backends. Each is one of two right ones with one line made wrong, no two at one line:",
        "the dense reference backend of `tests/conformance/mutants/victim/`, or the one of `partitioned/`, which pads",
        "sequences into batches, cuts keys into partitions and packs them by vectors. The unbroken ones fail none.",
        "Where a fault begins at a size, no case of level quick below it notices; the long run shows that.",
        "",
        "`make test` proves that the case named here kills each of them, and `make test-long` runs all quick cases on",
        "each to see which levels do. Where one level alone kills a mutant, a kit without that level would call it",
        "right; for one of each level, `make test` proves it afresh, and the long run with the cases of level full as",
        "well.",
        "",
        f"Field reports that the mutants stand for: {reports}.",
        "",
    ]
    for level in LEVELS:
        mine = [m for m in MUTANTS if m.level == level]
        lines += [f"## {level}", "", "| mutant | broken | from | stands for | killed by | levels that kill it |"]
        lines += ["|---|---|---|---|---|---|"]
        for m in mine:
            kill = kills[m.name]
            lines.append(
                f"| {m.name} | {m.broken} | {_size(m)} | {' '.join(m.reports) or '-'} | `{kill['case']}` "
                f"| {' '.join(kill['levels'])} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _size(mutant: Mutant) -> str:
    return "-" if mutant.past is None else f"{mutant.past[0]} {mutant.past[1]}"


def _axes(kills: Mapping[str, Kill]) -> str:
    lines = [
        "# Axes: what the kit varies",
        "",
        WRITTEN,
        "",
        "Every case of levels 1 to 5 has a value of each axis; `kvcore conform where.AXIS=VALUE` chooses by them. The",
        "figures are those of a backend that takes everything in blocks of 8 tokens; options are each backend's own,",
        "here those of the second victim. The last column names the [planted faults](mutants.md) that die by the axis",
        "alone: every case of level quick that notices them has a value of it which the plainest cases lack, so that",
        "a kit without those values would call them right.",
        f"Found out so far for {sum('axes' in k for k in kills.values())} of {len(kills)}.",
        "",
        "| axis | is | values | smallest | largest | cases: quick | full | dies by it alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    helps = {f.name: f.metadata["help"] for f in fields(WhereKeys)}
    for axis in AXES:
        full = [c for c in catalogue("partitioned" if axis == "options" else "victim") if c.seqs]
        quick = [c for c in full if c.tier == "quick"]
        values = sorted({shown(c.axes()[axis]) for c in full if axis in c.axes()}, key=natural)
        sizes = [n for c in full if (n := _number(c, axis)) is not None]
        extremes = [str(min(sizes)), str(max(sizes))] if sizes else ["-", "-"]
        counts = [str(sum(_varies(c, axis) for c in cases)) for cases in (quick, full)]
        mine = [name for name, kill in kills.items() if axis in kill.get("axes", ())]
        more = [f"{len(values) - MOST_VALUES} more"] if len(values) > MOST_VALUES else []
        listed = ", ".join([*(f"`{v}`" for v in values[:MOST_VALUES]), *more])
        row = [axis, helps[axis], listed, *extremes, *counts, ", ".join(mine) or "-"]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "*Cases* counts those with a value that the plainest cases lack.", ""]
    return "\n".join(lines)


def _varies(case: Case, axis: str) -> bool:
    return axis in case.axes() and shown(case.axes()[axis]) not in plain(axis)


def _number(case: Case, axis: str) -> int | float | None:
    found = case.sizes()[axis] if axis in BOUNDS else getattr(case, NUMBERS.get(axis, axis), None)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None
