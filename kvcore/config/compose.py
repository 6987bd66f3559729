"""Overrides in, one checked configuration out, through Hydra's compose API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from kvcore.config.home import conf_dir
from kvcore.config.hydra_session import hydra_session
from kvcore.config.keys import all_keys
from kvcore.config.nodes import root_node
from kvcore.config.overrides import check_keys, parse
from kvcore.config.schema import KVCoreConfig
from kvcore.config.validate import validate
from kvcore.errors import ConfigError, KVCoreError, RequestError
from kvcore.registry.registry import Registry, told


@dataclass(frozen=True)
class Composed:
    """A configuration, and where its values come from.

    Attributes:
        config: The values; `backends` and `plugins` map names to instances of their dataclasses.
        given: The keys and groups that overrides named.
        overrides: The overrides as typed.
    """

    config: KVCoreConfig
    given: frozenset[str]
    overrides: tuple[str, ...]


def compose(overrides: Sequence[str], registry: Registry) -> Composed:
    """Compose one configuration.

    Raises:
        ConfigError: Something in the overrides is wrong; see the subclasses.
        NotBuiltError: A key asks for what is not built yet.
    """
    parsed = parse(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                "several values for one key need -m, which runs one job a value",
                field=override.key_or_group,
                got=override.input_line,
                allowed="one value",
                remedy="add -m, or quote the value if it is one text with commas",
            )
    return compose_parsed(parsed, overrides, registry)


def compose_parsed(parsed: Sequence[Override], overrides: Sequence[str], registry: Registry) -> Composed:
    """As `compose`, for overrides that are parsed already."""
    node = root_node(registry)
    check_keys(parsed, registry)
    try:
        with hydra_session(conf_dir(), node):
            composed = hydra_compose("config", overrides=list(overrides))
        config = OmegaConf.to_object(composed)
    except RequestError as error:  # of `sampling`, which is checked where it is made
        raise ConfigError(
            error.message, field=error.field, got=error.got, allowed=error.allowed, remedy=error.remedy
        ) from error
    except KVCoreError:
        raise  # from the __post_init__ of a dataclass of options
    except (HydraException, OmegaConfBaseException) as error:
        raise _typed(error, parsed, registry) from error
    except Exception as error:
        raise ConfigError(
            f"the options of a backend or plugin refuse their values: {told(error)}",
            field=", ".join(o.key_or_group for o in parsed),
            got=list(overrides),
        ) from error
    if not isinstance(config, KVCoreConfig):
        raise ConfigError("conf/config.yaml does not follow the schema", field="conf", got=type(config))
    validate(config, registry)
    return Composed(config, frozenset(o.key_or_group for o in parsed), tuple(overrides))


def _typed(error: Exception, parsed: Sequence[Override], registry: Registry) -> ConfigError:
    """Hydra's exception in our words, without the names of its classes; the innermost cause tells most."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    field: Any = getattr(cause, "full_key", None)
    if field is None:
        field = next((line[len("full_key: ") :] for line in lines if line.startswith("full_key: ")), None)
    field = field.partition("[")[0] if field else field  # an element of a list
    mine = next((o for o in parsed if o.key_or_group == field), None)
    expected = next((k.type for k in all_keys(registry) if k.path == field), None)
    field = field or (parsed[-1].key_or_group if len(parsed) == 1 else None)
    if isinstance(cause, InterpolationResolutionError):
        message = "the value refers by ${...} to something that is not there"
    else:
        message = f"{field or 'a value'} does not take a value of this type"
    return ConfigError(
        message,
        field=field,
        got=mine.input_line if mine else None,
        allowed=expected,
        remedy="`kvcore COMMAND --help` shows the type of every key",
    )
