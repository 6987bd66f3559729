"""Reading a JSON object that a stranger wrote: bounded in size and depth, each key once. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcore.errors import ModelError

LARGEST_FILE = 64 << 20
DEEPEST = 50


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's directory.

    Raises:
        ModelError: Unreadable, not JSON, no object, too large, too deep, or a key twice with unlike values.
    """

    def one_value_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found and found[name] != value:
                raise ModelError(
                    f"{file.name} gives {name} twice", field=name, got=[found[name], value], allowed="once"
                )
            found[name] = value
        return found

    try:
        if file.stat().st_size > LARGEST_FILE:
            raise _error(f"{file.name} is too large", f"{file.stat().st_size} bytes", f"up to {LARGEST_FILE} bytes")
        found = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=one_value_each)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of thousands of digits
        raise _error(f"{file.name} is not JSON that can be read: {error}", str(file), "a JSON object") from error
    if _is_deeper(found, DEEPEST):
        raise _error(f"{file.name} is nested too deeply", str(file), f"up to {DEEPEST} levels")
    if not isinstance(found, dict):
        raise _error(f"{file.name} holds no JSON object", type(found).__name__, "a JSON object")
    return found


def unreadable(file: Path, error: OSError | UnicodeDecodeError) -> ModelError:
    """The error for a file that cannot be read."""
    why = getattr(error, "strerror", None) or "it is not UTF-8"
    return _error(f"cannot read {file}: {why}", str(file), "a file of UTF-8 text")


def _error(message: str, got: str, allowed: str) -> ModelError:
    return ModelError(message, field="model.path", got=got, allowed=allowed)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists lie deeper in each other than `levels`; what prints them recurses."""
    level = [value]
    for _ in range(levels):
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [entry for values in inner for entry in values]
    return bool(level)
