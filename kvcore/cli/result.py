"""What a command hands back, and how it is printed."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvcore.errors import plain

if TYPE_CHECKING:
    from kvcore.config.compose import Composed
    from kvcore.config.schema import Root
    from kvcore.registry.registry import Registry

DONE, NO, BAD_INPUT, BUG = 0, 1, 2, 3


R_co = TypeVar("R_co", bound="Root", covariant=True)


@dataclass(frozen=True)
class Job(Generic[R_co]):
    """One run of a command.

    Attributes:
        composed: Its configuration.
        registry: Installed plugins.
        prompts: Texts of `--prompt`, `-` already replaced by standard input.
    """

    composed: Composed[R_co]
    registry: Registry
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The outcome.

    Attributes:
        document: The JSON document.
        text: The same for people.
        status: Exit status.
    """

    document: dict[str, Any]
    text: str
    status: int = DONE


@dataclass
class Flags:
    """The flags of a command; everything else is overrides.

    Attributes:
        prompts: Values of `--prompt`, in order.
        multirun: `-m` was given.
        help: `--help` was given.
        composed: `--cfg` was given: print the configuration, and do nothing.
        config, dirs: Values of `--config` and `--config-dir`.
        overrides: The rest.
    """

    prompts: list[str] = field(default_factory=list)
    multirun: bool = False
    help: bool = False
    composed: bool = False
    config: str | None = None
    dirs: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)


def to_json(document: Any) -> str:
    """One JSON document; numbers that JSON does not have become null.

    Only where standard output is UTF-8 are signs beyond ASCII written as they are.
    """
    escaped = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
    return json.dumps(_finite(plain(document)), ensure_ascii=escaped, indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value
