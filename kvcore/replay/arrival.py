"""`Arrival`: one request of a trace, and how a line that is none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvcore.errors import ConfigError

MOST_TOKENS = 2**28  # a prompt beyond this is a broken line, not a request


class Arrival(NamedTuple):
    """One request.

    Attributes:
        second: When it came, in seconds since the first one.
        prompt_tokens: Length of its prompt.
        output_tokens: How many tokens it generated.
        hash_ids: Names of the prompt's runs of 512 tokens, the last one cut at the prompt's end; None where the trace
            tells nothing of the prompts.
    """

    second: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


def check_arrival(arrival: Arrival, path: Path, line: int) -> Arrival:
    """The arrival, if its numbers can be a request's.

    Raises:
        ConfigError: They cannot; names the line.
    """
    for name, count in (("prompt", arrival.prompt_tokens), ("generated", arrival.output_tokens)):
        if not 1 <= count <= MOST_TOKENS:
            raise bad_line(path, line, f"{name} tokens: {count}", f"1 to {MOST_TOKENS}")
    if not 0 <= arrival.second < float("inf"):
        raise bad_line(path, line, f"arrives at {arrival.second} s", "a time that is not negative")
    return arrival


def bad_line(path: Path, line: int, got: object, allowed: str) -> ConfigError:
    """The error that names a line of a trace."""
    return ConfigError(f"line {line} of the trace {path.name} is no request", field="trace", got=got, allowed=allowed)
