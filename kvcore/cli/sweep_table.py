"""How a sweep of plans ends: one table of all of them, and a plot of the tokens that each holds against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

from kvcore.cli.result import BAD_INPUT

HEIGHT = 12
LEAST_CELL = 7


@dataclass(frozen=True)
class SweepRow:
    """One job of a sweep.

    Attributes:
        mark: Its letter in the plot.
        overrides: What it was told that not all were told.
        plan: The document of its plan, or None where it was refused.
        error: Why.
    """

    mark: str
    overrides: tuple[str, ...]
    plan: Mapping[str, Any] | None
    error: str = ""

    def tokens(self) -> dict[int, int]:
        """Tokens of as many whole sequences as it holds, by their length."""
        at_once = {} if self.plan is None else self.plan["simultaneous"]
        return {int(length): int(length) * count for length, count in at_once.items()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shown = {} if self.plan is None else {name: self.plan[name] for name in COLUMNS.values()}
        return {
            "overrides": list(self.overrides),
            **shown,
            "tokens_by_length": self.tokens(),
            "error": self.error or None,
        }


COLUMNS = {
    "placement": "placement",
    "bytes a token": "bytes_per_token",
    "tokens": "tokens",
    "at once": "max_concurrency",
    "fits": "fits",
    "longest": "max_model_len_fits",
    "padding": "waste_fraction",
}


def sweep_rows(jobs: Sequence[Mapping[str, Any]]) -> list[SweepRow]:
    """The rows of a sweep's jobs; what all of them were told is left out."""
    common = set.intersection(*({*job["overrides"]} for job in jobs)) if len(jobs) > 1 else set()
    rows = []
    for i, job in enumerate(jobs):
        refused = job["status"] >= BAD_INPUT
        rows.append(
            SweepRow(
                ascii_lowercase[i] if i < len(ascii_lowercase) else "+",
                tuple(word for word in job["overrides"] if word not in common),
                None if refused else job["result"],
                str(job["result"]["error"]["message"]) if refused else "",
            )
        )
    return rows


def table(rows: Sequence[SweepRow]) -> list[str]:
    """One line a job, the longest cell of a column as its width."""
    cells = [["", "", *COLUMNS]]
    for row in rows:
        told = " ".join(row.overrides)
        if row.plan is None:
            cells.append([row.mark, told, f"refused: {row.error}"])
        else:
            cells.append([row.mark, told, *(_cell(name, row.plan[name]) for name in COLUMNS.values())])
    whole = [line for line in cells if len(line) == len(cells[0])]
    widths = [max(len(line[i]) for line in whole) for i in range(len(cells[0]))]
    widths[1] = max(len(line[1]) for line in cells)
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip() for line in cells]


def _cell(name: str, value: Any) -> str:
    if name == "waste_fraction":
        return f"{value:.2%}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def plot(rows: Sequence[SweepRow]) -> list[str]:
    """Tokens upwards, lengths to the right; each job is a letter, and several in one place stand side by side."""
    held = {row.mark: row.tokens() for row in rows if row.plan is not None}
    lengths = sorted({length for tokens in held.values() for length in tokens})
    most = max((count for tokens in held.values() for count in tokens.values()), default=0)
    if not most:
        return ["nothing fits, at any length: no plot"]
    places: dict[tuple[int, int], str] = {}
    for mark, tokens in held.items():
        for length, count in tokens.items():
            at = (_level(count, most), length)
            places[at] = places.get(at, "") + mark
    cell = max(LEAST_CELL, *(len(str(n)) for n in lengths), *(len(p) for p in places.values())) + 1
    gutter = len(f"{most:,}")
    lines = ["tokens of whole sequences at once, by their length"]
    for level in range(HEIGHT, -1, -1):
        scale = f"{most * level // HEIGHT:,}" if level % 3 == 0 else ""
        row_of_plot = "".join(places.get((level, n), "").rjust(cell) for n in lengths)
        lines.append(f"{scale.rjust(gutter)} |{row_of_plot}".rstrip())
    lines.append(f"{' ' * gutter} +{'-' * cell * len(lengths)}")
    lines.append(f"{' ' * gutter}  {''.join(str(n).rjust(cell) for n in lengths)}")
    return lines


def _level(count: int, most: int) -> int:
    return round(HEIGHT * count / most)


def summarize(jobs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """What the sweep adds to the JSON document, and to the text."""
    rows = sweep_rows(jobs)
    return {"table": [row.as_dict() for row in rows]}, "\n".join([*table(rows), "", *plot(rows)])
