"""The reader of Azure's LLM inference traces of 2023: when, how many tokens in, how many out; nothing of prompts."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from kvcore.replay.arrival import Arrival, bad_line, check_arrival

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> list[Arrival]:
    """The requests of a CSV file with the columns `COLUMNS`; times are UTC."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise bad_line(path, 1, rows.fieldnames, ",".join(COLUMNS))
        return [_arrival(row, path, line) for line, row in enumerate(rows, 2)]


def _arrival(row: dict[str, str], path: Path, line: int) -> Arrival:
    try:
        when, prompt, generated = (row[name] for name in COLUMNS)
        # Seven digits of a second; Python reads six.
        second = datetime.fromisoformat(when[:26]).replace(tzinfo=UTC).timestamp()
        arrival = Arrival(second, int(prompt), int(generated))
    except (TypeError, ValueError) as error:
        raise bad_line(path, line, list(row.values()), "2023-11-16 18:15:46.6805900,374,44") from error
    return check_arrival(arrival, path, line)
