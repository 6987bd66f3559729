"""Reading `config.json`: the file, its nested text part, and fields by name or alias. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.errors import ModelError

# The same fact under the names that different model types give it.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "seq_length",
        "n_ctx",
        "max_sequence_length",
        "max_target_positions",
    ),
    "vocab_size": ("padded_vocab_size",),
    "dtype": ("torch_dtype",),
    "num_experts": ("n_routed_experts", "num_local_experts"),
}
# Beyond these a number is a typing error, not a model; without a limit a plan would loop for hours.
LARGEST = {"num_hidden_layers": 10_000, "max_position_embeddings": 1 << 31}
DEFAULT_LARGEST = 1 << 24


def config_file(path: str | Path) -> Path:
    """The `config.json` that `path` names: the file itself, or the one in a directory.

    Raises:
        ModelError: There is no such directory, or no `config.json` in it.
    """
    given = Path(path).expanduser()
    if not given.exists():
        raise ModelError(
            f"there is no file or directory {str(path)!r}",
            field="model.path",
            got=str(path),
            allowed="a Hugging Face directory or a config.json",
            remedy="check the path; nothing is downloaded for model.path",
        )
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ModelError(
            f"the directory {str(path)!r} has no config.json",
            field="model.path",
            got=str(path),
            allowed="a directory with config.json",
        )
    return file


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory, or of the file itself.

    Raises:
        ModelError: Missing, unreadable, not JSON, or not an object.
    """
    file = config_file(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file}: {error}", field="model.path", got=str(path)) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(
            f"{file.name} is not JSON: {error}", field="model.path", got=str(path), allowed="a JSON object"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{file.name} holds no JSON object", field="model.path", got=type(config).__name__, allowed="a JSON object"
        )
    return config


class Fields:
    """The fields of a config, each checked where it is read.

    A field is looked up by its name and then by the aliases of older model types, first in the nested
    `text_config` of a multimodal model, then at the top.

    Args:
        config: A parsed `config.json`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        self.outer = config
        self.inner: Mapping[str, Any] = text if isinstance(text, Mapping) and text else config

    @property
    def model_type(self) -> str:
        """``model_type`` of the text part, else of the whole."""
        for level in (self.inner, self.outer):
            value = level.get("model_type")
            if isinstance(value, str) and value:
                return value
        raise ModelError(
            "the config has no model_type",
            field="model_type",
            got=self.outer.get("model_type"),
            allowed="a name such as llama",
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value of a field; null counts as absent."""
        for level in (self.inner, self.outer):
            for key in (name, *ALIASES.get(name, ())):
                if level.get(key) is not None:
                    return level[key]
        return default

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer field of at least `least`; absent without a default is an error.

        Raises:
            ModelError: Names the field, the value and what is allowed.
        """
        value = self.get(name, default)
        largest = LARGEST.get(name, DEFAULT_LARGEST)
        if value is None:
            names = " or ".join((name, *ALIASES.get(name, ())))
            raise ModelError(
                f"config.json lacks {name}", field=name, got=None, allowed=f"an integer >= {least} as {names}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
            raise ModelError(
                f"{name} in config.json is not usable",
                field=name,
                got=value,
                allowed=f"an integer from {least} to {largest}",
            )
        return value

    def optional(self, name: str, *, least: int = 1) -> int | None:
        """An integer field, or None where it is absent or null."""
        return None if self.get(name) is None else self.integer(name, least=least)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"{name} in config.json is not usable", field=name, got=value, allowed="a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A true or false field."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{name} in config.json is not usable", field=name, got=value, allowed="true or false")
        return value

    def listing(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list field of at least `length` entries, or None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ModelError(f"{name} in config.json is not a list", field=name, got=value, allowed="a list")
        if length is not None and len(value) < length:
            raise ModelError(
                f"{name} in config.json is too short",
                field=name,
                got=f"{len(value)} entries",
                allowed=f"one for each of {length} layers",
            )
        return list(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """The first of the named fields that is an object; empty where none is."""
        for name in names:
            value = self.get(name)
            if value is not None and not isinstance(value, Mapping):
                raise ModelError(f"{name} in config.json is not an object", field=name, got=value, allowed="an object")
            if value:
                return dict(value)
        return {}

    def section(self, name: str) -> Fields:
        """The fields of a nested object; empty where it is absent."""
        return Fields(self.mapping(name))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.integer("num_hidden_layers")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """KV heads; as many as query heads where the config is silent."""
        return self.integer("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Head dimension; ``hidden_size / num_attention_heads`` where the config is silent."""
        given = self.optional("head_dim")
        if given is not None:
            return given
        hidden = self.integer("hidden_size")
        if hidden % self.heads:
            raise ModelError(
                "hidden_size is no multiple of num_attention_heads, and head_dim is not given",
                field="num_attention_heads",
                got=f"{hidden} / {self.heads}",
                allowed="a whole number",
            )
        return hidden // self.heads

    @property
    def rope(self) -> Mapping[str, Any]:
        """The rope settings, under their new name or the old one; those of full layers where nested."""
        rope = self.mapping("rope_parameters", "rope_scaling")
        full = rope.get("full_attention")
        return dict(full) if isinstance(full, Mapping) else rope

    @property
    def rope_type(self) -> str:
        """``default``, ``yarn``, ``longrope``, ``dynamic``, ..."""
        return str(self.rope.get("rope_type") or self.rope.get("type") or "default")
