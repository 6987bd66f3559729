"""`Source`: values as Python text, and the imports that the text needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any


class Source:
    """Turns values into text and remembers what has to be imported for it."""

    def __init__(self) -> None:
        self._imports: dict[str, set[str]] = {}
        self._unreachable: list[str] = []

    def take(self, module: str, name: str) -> str:
        """The name, which is imported from the module."""
        self._imports.setdefault(module, set()).add(name)
        return name

    def name(self, cls: type) -> str:
        """A class by its name; one that no import reaches, inside a function, has a comment instead."""
        path: str = cls.__qualname__
        found: object = sys.modules.get(cls.__module__)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is cls and cls.__module__ != "__main__":
            self.take(cls.__module__, path.partition(".")[0])
            return path
        line = f"# {cls.__name__} is {cls.__module__}.{path}, which no import reaches"
        if line not in self._unreachable:
            self._unreachable.append(line)
        return cls.__name__

    def value(self, value: object) -> str:
        """A value: plain ones by their repr, dataclasses by what differs from their defaults."""
        if isinstance(value, type):
            return self.name(value)
        if isinstance(value, Enum):
            return f"{self.name(type(value))}.{value.name}"
        if is_dataclass(value) and not isinstance(value, type):
            given = [f for f in fields(value) if f.init and getattr(value, f.name) != _default(f)]
            return self.call(type(value), {f.name: getattr(value, f.name) for f in given})
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
        if type(value) is list:
            return "[" + ", ".join(map(self.value, value)) + "]"
        if type(value) is tuple:
            return "(" + "".join(f"{self.value(v)}, " for v in value).removesuffix(" ") + ")"
        return repr(value)

    def call(self, cls: type, arguments: Mapping[str, object]) -> str:
        """A call of a class with keyword arguments."""
        inside = ", ".join(f"{name}={self.value(value)}" for name, value in arguments.items())
        return f"{self.name(cls)}({inside})"

    def imports(self) -> str:
        """The import lines, then a comment for each class that no import reaches."""
        known = [f"from {m} import {', '.join(sorted(names))}" for m, names in sorted(self._imports.items())]
        return "\n".join([*known, *self._unreachable]) + "\n"


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
