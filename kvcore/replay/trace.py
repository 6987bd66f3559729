"""`Trace`: who asked for how many tokens, when, and what was known of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.replay import azure, mooncake
from kvcore.replay.arrival import Arrival

READERS: dict[str, Callable[[Path], list[Arrival]]] = {".csv": azure.read, ".jsonl": mooncake.read}


@dataclass(frozen=True)
class Trace:
    """A recorded load.

    Attributes:
        name: The file's name.
        arrivals: In order of time; the first is at second 0.
    """

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def has_prefixes(self) -> bool:
        """Whether the trace says which prompts begin alike."""
        return any(a.hash_ids is not None for a in self.arrivals)


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a trace; its ending tells the format: ``.csv`` is Azure's, ``.jsonl`` Mooncake's.

    Args:
        path: The file.
        limit: Keep so many requests, the earliest; None keeps all.

    Raises:
        ConfigError: The file cannot be read, or a line is none of this format; names the line.
    """
    read = READERS.get(path.suffix)
    if read is None:
        raise ConfigError(
            "the ending of a trace's name tells its format, and this one is none",
            field="trace",
            got=path.name,
            allowed=[f"NAME{ending}" for ending in READERS],
        )
    try:
        arrivals = read(path)
    except (OSError, UnicodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"the trace cannot be read: {told}", field="trace", got=str(path), allowed="a file"
        ) from error
    if not arrivals:
        raise ConfigError("the trace has no requests", field="trace", got=str(path), allowed="at least one request")
    arrivals.sort(key=lambda a: a.second)
    start = arrivals[0].second
    kept = (a._replace(second=a.second - start) for a in arrivals[:limit])
    return Trace(path.name, tuple(kept))
