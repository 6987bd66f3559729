"""The reader of Mooncake's traces (FAST'25): arrivals with the hashes of each 512 tokens of the prompt."""

from __future__ import annotations

import json
from pathlib import Path

from kvcore.replay.arrival import Arrival, bad_line, check_arrival
from kvcore.replay.tokens import RUN

EXAMPLE = '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}'
MOST_ID = 2**48


def read(path: Path) -> list[Arrival]:
    """The requests of a file of JSON lines; times are milliseconds."""
    with path.open(encoding="utf-8") as file:
        return [_arrival(text, path, line) for line, text in enumerate(file, 1) if text.strip()]


def _arrival(text: str, path: Path, line: int) -> Arrival:
    try:
        row = json.loads(text)
        ids = tuple(map(int, row["hash_ids"]))
        arrival = Arrival(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), ids)
    except (KeyError, TypeError, ValueError) as error:
        raise bad_line(path, line, text.strip(), EXAMPLE) from error
    runs = -(-arrival.prompt_tokens // RUN)
    if len(ids) != runs or not all(0 <= i < MOST_ID for i in ids):
        allowed = f"{runs} ids, one for each {RUN} tokens of {arrival.prompt_tokens}, from 0 to {MOST_ID - 1}"
        raise bad_line(path, line, f"{len(ids)} ids", allowed)
    return check_arrival(arrival, path, line)
