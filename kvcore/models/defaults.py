"""What a model type holds where its `config.json` is silent: a table out of transformers' config classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TypeDefaults:
    """One row of `defaults.json`.

    Attributes:
        values: Fields and their defaults, under the names of the class.
        aliases: A second name of a field, and the name in `values`.
        nullable: Fields whose default is not null, where a written null is accepted all the same.
        whole_heads: Whether the class refuses a width that is no multiple of the number of heads.
        text_type: For an outer class, the model type of a text part that names none; else None.
        text_config: For an outer class, what differs where the text part is absent altogether.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    whole_heads: bool = False
    text_type: str | None = None
    text_config: Mapping[str, Any] = field(default_factory=dict)

    def knows(self, name: str) -> bool:
        """Whether the class reads a field of this name."""
        return name in self.values or name in self.aliases

    def takes_null(self, name: str) -> bool:
        """Whether the class accepts a written null for a field."""
        own = self.own(name)
        return self.values.get(own) is None or own in self.nullable

    def own(self, name: str) -> str:
        """The name in `values` of a field."""
        return name if name in self.values else self.aliases.get(name, name)


@cache
def _table() -> dict[str, TypeDefaults]:
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    return {name: TypeDefaults(**row) for name, row in json.loads(text)["types"].items()}


def defaults_of(model_type: str) -> TypeDefaults | None:
    """The row of a model type, or None for one that transformers has no class for."""
    return _table().get(model_type)
