"""Which part of a `config.json` describes the text model, and by which name it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcore.errors import ModelError
from kvcore.models.defaults import defaults_of

# Where multimodal and encoder-decoder configs keep their text model; one of them may hold another.
TEXT_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
    "decoder",
    "generator",
)
DEEPEST = 4


class TextPart(NamedTuple):
    """The text model of a config.

    Attributes:
        inner: Its fields.
        model_type: The type that its fields mean; empty where nothing says it.
        types: Every model type on the way to it, outermost first.
    """

    inner: Mapping[str, Any]
    model_type: str
    types: tuple[str, ...]


def text_part(config: Mapping[str, Any]) -> TextPart:
    """The innermost text part of a config, or the config itself.

    A part that names no type has the one that its outer class gives it, never the outer class's own.

    Raises:
        ModelError: A part is no object, two parts are given, or a model type is no name.
    """
    inner, types, own = config, [*_type_of(config)], _type_of(config)
    for _ in range(DEEPEST):
        outer = defaults_of(own[0]) if own else None
        nests = outer is not None and outer.text_type is not None
        found = {n: inner[n] for n in TEXT_PARTS if inner.get(n) or (nests and inner.get(n) == {})}
        for name, part in found.items():
            if not isinstance(part, Mapping):
                raise ModelError(f"{name} in config.json is not an object", field=name, got=part, allowed="an object")
        if not found:
            break
        name, part = next(iter(found.items()))
        if len(found) > 1 or (outer is not None and not nests):
            raise ModelError(
                "config.json describes two text models",
                field=name,
                got=[*found] if len(found) > 1 else f"beside the fields of {own[0]}",
                allowed="one text part, in a config whose model type has one",
            )
        inner, written = part, _type_of(part)
        types += written
        own = written or (_text_type(own[0]) if own else [])
    else:
        raise ModelError("text parts are nested too deeply", field=name, got=f"more than {DEEPEST} levels")
    final = _text_type(own[0])[0] if own else ""
    row = defaults_of(own[0]) if own else None
    if inner is config and row is not None and row.text_type is not None and not _describes_layers(config):
        inner = {**config, **row.text_config}
    return TextPart(inner, final, tuple(dict.fromkeys([*types, *([final] if final else [])])))


def _type_of(level: Mapping[str, Any]) -> list[str]:
    value = level.get("model_type")
    if value is None:
        return []
    if not isinstance(value, str) or not value:
        raise ModelError(
            "model_type in config.json is not usable", field="model_type", got=value, allowed="a name such as llama"
        )
    return [value]


def _text_type(name: str) -> list[str]:
    row = defaults_of(name)
    return [name if row is None or row.text_type is None else row.text_type]


def _describes_layers(config: Mapping[str, Any]) -> bool:
    """Some tools write a multimodal model's text fields at the top; then they are its text part."""
    return any(config.get(name) is not None for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
