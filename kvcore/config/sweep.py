"""`-m`: one job for each combination of values, expanded with Hydra's own override parser."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from kvcore.config.overrides import parse
from kvcore.errors import ConfigError

MOST_JOBS = 10_000


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job; the last sweep varies fastest.

    Raises:
        ConfigError: A sweep is malformed, of a kind without a list of values, or far too large.
    """
    choices: list[list[str]] = []
    jobs = 1
    for override in parse(overrides):
        values = _values(override) if override.is_sweep_override() else [str(override.input_line)]
        jobs *= len(values)
        if jobs > MOST_JOBS:
            raise ConfigError(
                "the sweep has too many jobs", field=override.key_or_group, got=jobs, allowed=f"<= {MOST_JOBS}"
            )
        choices.append(values)
    return [list(job) for job in product(*choices)]


def _values(override: Override) -> list[str]:
    name = override.key_or_group
    try:
        # One more than allowed: a range can be endless.
        values = islice(override.sweep_string_iterator(), MOST_JOBS + 1)
        return [f"{name}={value}" for value in values]
    except (HydraException, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            "this sweep has no list of values",
            field=name,
            got=override.input_line,
            allowed="a,b,c or choice(...) or range(...)",
        ) from error
