"""Reading `config.json`: the file, its nested text part, and fields by name or alias. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvcore.errors import ModelError
from kvcore.models.defaults import defaults_of
from kvcore.models.json_file import read_object, unreadable
from kvcore.models.nesting import TextPart, text_part

T = TypeVar("T")
ABSENT: Any = object()

# The same fact under the names that different model types give it.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
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
LARGEST = {"num_hidden_layers": 10_000, "max_position_embeddings": 1 << 31, "longest": 1 << 40}
DEFAULT_LARGEST = 1 << 24
LARGEST_NUMBER = 1e30
# What transformers reads at the top although the text part lies deeper.
FROM_OUTER = frozenset(
    ("architectures", "compression_config", "dtype", "eos_token_id", "is_encoder_decoder", "quantization_config")
)
# A dtype at the top is the one that is loaded, whatever its parts say.
OUTER_FIRST = frozenset(("dtype",))


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
            remedy="check the path; a model of the Hugging Face hub is written ORG/NAME",
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
    try:
        file = config_file(path)
    except OSError as error:
        raise unreadable(Path(path), error) from error
    return read_object(file)


class Fields:
    """The fields of a config, each checked where it is read.

    A field is looked up by its name and then by its aliases, in the text part of the config; only
    `FROM_OUTER` is looked up at the top as well. Where a field is absent, the default of the model type holds.

    Args:
        config: A parsed `config.json`, or an object in it.
        nested: Whether the config may hold a text part; an object within it may not.

    Attributes:
        outer: The config as it was given.
        inner: Its text part, or itself.
        types: The model types on the way to the text part, outermost first.
        assumed: Fields whose default was taken, and their values.
    """

    def __init__(self, config: Mapping[str, Any], *, nested: bool = True) -> None:
        part = text_part(config) if nested else TextPart(config, "", ())
        self.outer = config
        self.inner, self._type, self.types = part
        self.assumed: dict[str, Any] = {}
        self._defaults = defaults_of(self._type)
        self._once: dict[str, Any] = {}
        self._names: dict[str, tuple[str, ...]] = {}

    @property
    def model_type(self) -> str:
        """The model type that the fields mean: that of the text part."""
        if not self._type:
            raise ModelError(
                "the config has no model_type",
                field="model_type",
                got=self.outer.get("model_type"),
                allowed="a name such as llama",
            )
        return self._type

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives, made at the first call: a list is validated once, not once a layer."""
        if name not in self._once:
            self._once[name] = make()
        found: T = self._once[name]
        return found

    def names(self, name: str) -> tuple[str, ...]:
        """The names under which this model type may give a field."""
        found = self._names.get(name)  # a field is read once a layer
        if found is None:
            found = self._names[name] = self._names_of(name)
        return found

    def _names_of(self, name: str) -> tuple[str, ...]:
        row, aliases = self._defaults, ALIASES.get(name, ())
        if row is None or name in FROM_OUTER:
            return (name, *aliases)
        mapped = row.aliases.get(name)
        back = [new for new, own in row.aliases.items() if own == name]
        known = [alias for alias in aliases if row.knows(alias)]
        if name == "max_position_embeddings" and not known and not row.knows(name):
            known = list(aliases)  # ALiBi and states need no length, but checkpoints tell one
        return tuple(dict.fromkeys((name, *([mapped] if mapped else []), *back, *known)))

    def given(self, name: str) -> bool:
        """Whether the config itself names a field, be it as null."""
        return self._written(name) is not ABSENT

    def _written(self, name: str) -> Any:
        levels = [self.inner]
        if name in FROM_OUTER and self.outer is not self.inner:
            levels.insert(0 if name in OUTER_FIRST else 1, self.outer)
        value: Any = ABSENT
        for level in levels:
            for key in self.names(name):
                found = level.get(key, ABSENT)
                if found is ABSENT or (found is None and value is not ABSENT):
                    continue
                if value is ABSENT or value is None:
                    value = found
                elif self._defaults is not None and level is self.inner and found != value and name not in FROM_OUTER:
                    raise ModelError(
                        f"config.json gives {name} two values", field=name, got=[value, found], allowed="one value"
                    )
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value of a field, else the default of the model type; `default` where that is null too.

        Raises:
            ModelError: Two names of the field disagree.
        """
        value, row = self._written(name), self._defaults
        if row is not None and value is ABSENT:
            value = next((row.values[key] for key in self.names(name) if key in row.values), None)
            if value is not None:
                self.assumed[name] = value
        return default if value is ABSENT or value is None else value

    def refuse_broken_heads(self) -> None:
        """Refuse a width that is no multiple of the number of heads where transformers' class does.

        Raises:
            ModelError: Names both.
        """
        if self._defaults is not None and self._defaults.whole_heads:
            self._whole_head_dim()

    def refuse_nulls(self, unless: Collection[str]) -> None:
        """Refuse a null where transformers' class takes none, but for the fields of `unless`.

        Raises:
            ModelError: Names the field.
        """
        row = self._defaults
        for name, value in self.inner.items():
            if row is None or value is not None or name in unless or not row.knows(name) or row.takes_null(name):
                continue
            own = row.values.get(row.own(name))
            raise ModelError(
                f"{name} in config.json is null; {self._type} needs a value",
                field=name,
                got=None,
                allowed=f"a value, or no such field, which means {own}",
            )

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
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_NUMBER:
            raise ModelError(f"{name} in config.json is not usable", field=name, got=value, allowed="a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A true or false field."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{name} in config.json is not usable", field=name, got=value, allowed="true or false")
        return value

    def listing(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list field of exactly `length` entries where that is given, or None where it is absent."""
        return self.once(f"list {name} {length}", lambda: self._listing(name, length))

    def _listing(self, name: str, length: int | None) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ModelError(f"{name} in config.json is not a list", field=name, got=value, allowed="a list")
        if length is not None and len(value) != length:
            raise ModelError(
                f"{name} in config.json does not fit the number of layers",
                field=name,
                got=f"{len(value)} entries",
                allowed=f"one for each of {length} layers",
            )
        return list(value)

    def per_layer(self, name: str, allowed: Collection[Any], length: int | None) -> list[Any] | None:
        """A list with one of the `allowed` values (of the same types) for each layer, or None."""
        return self.once(f"layers {name} {length}", lambda: self._per_layer(name, allowed, length))

    def _per_layer(self, name: str, allowed: Collection[Any], length: int | None) -> list[Any] | None:
        listed = self.listing(name, length)
        exact = {(type(value), value) for value in allowed}
        for entry in listed or ():
            if not isinstance(entry, str | int) or (type(entry), entry) not in exact:
                raise ModelError(
                    f"{name} in config.json has an entry that is no kind of layer",
                    field=name,
                    got=entry,
                    allowed=sorted(allowed),
                )
        return listed

    def indices(self, name: str, length: int, *, first: int = 0) -> frozenset[int] | None:
        """A list of layers by number, each once, counted from `first`; given here from 0 on. None where absent."""
        return self.once(f"indices {name}", lambda: self._indices(name, length, first))

    def _indices(self, name: str, length: int, first: int) -> frozenset[int] | None:
        listed = self.listing(name)
        if listed is None:
            return None
        for entry in listed:
            if isinstance(entry, bool) or not isinstance(entry, int) or not first <= entry < first + length:
                raise ModelError(
                    f"{name} in config.json names a layer that is not there",
                    field=name,
                    got=entry,
                    allowed=f"integers from {first} to {first + length - 1}",
                )
        if len(set(listed)) != len(listed):
            raise ModelError(f"{name} in config.json names a layer twice", field=name, got=listed, allowed="each once")
        return frozenset(entry - first for entry in listed)

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
        return self.once(f"section {name}", lambda: Fields(self.mapping(name), nested=False))

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
        return self._whole_head_dim() if given is None else given

    def _whole_head_dim(self) -> int:
        hidden = self.integer("hidden_size")
        if hidden % self.heads:
            raise ModelError(
                "hidden_size is no multiple of num_attention_heads",
                field="num_attention_heads",
                got=f"{hidden} / {self.heads}",
                allowed="a whole number",
            )
        return hidden // self.heads
