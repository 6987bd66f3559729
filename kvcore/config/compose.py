"""Overrides in, one checked configuration out, through Hydra's compose API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar, overload

from hydra import compose as hydra_compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from kvcore.config.home import conf_dir, preset_files
from kvcore.config.hydra_session import ROOT_NAME, hydra_session
from kvcore.config.keys import all_keys
from kvcore.config.nodes import defaults_list, root_node
from kvcore.config.overrides import check_keys, parse
from kvcore.config.schema import EngineRoot, Root
from kvcore.config.sources import EXPERIMENT, Files, experiment_overrides, overrides_of, read_yaml
from kvcore.errors import ConfigError, KVCoreError, RequestError, UnknownKeyError
from kvcore.registry.registry import Registry, told

R = TypeVar("R", bound=Root)
R_co = TypeVar("R_co", bound=Root, covariant=True)
TYPED = "command line"
NO_FILES = Files()


class Said(NamedTuple):
    """One override, and who said it.

    Attributes:
        override: As parsed.
        origin: ``command line``, ``--config FILE`` or ``experiment=NAME``.
    """

    override: Override
    origin: str


@dataclass(frozen=True)
class Composed(Generic[R_co]):
    """A configuration, and where its values come from.

    Attributes:
        config: The values; `backends` and `plugins` map names to instances of their dataclasses.
        given: The keys and groups that somebody named.
        origins: Who said each key that is not at its default, the presets' included.
    """

    config: R_co
    given: frozenset[str]
    origins: dict[str, str]


@overload
def compose(overrides: Sequence[str], registry: Registry) -> Composed[EngineRoot]: ...


@overload
def compose(overrides: Sequence[str], registry: Registry, root: type[R], files: Files = NO_FILES) -> Composed[R]: ...


def compose(
    overrides: Sequence[str], registry: Registry, root: type[Any] = EngineRoot, files: Files = NO_FILES
) -> Composed[Any]:
    """Compose one configuration.

    What is typed wins over `--config`, that over `experiment=`, that over presets and defaults.

    Args:
        overrides: As typed.
        registry: Installed plugins.
        root: What may be said, and the class of the result.
        files: Files and folders of the user.

    Raises:
        ConfigError: Something is wrong, or two files contradict each other; see the subclasses.
        NotBuiltError: A key asks for what is not built yet.
    """
    folders = files.folders()
    said = _gathered(overrides, files)
    for override, _ in said:
        if override.is_sweep_override():
            raise ConfigError(
                "several values for one key need -m, which runs one job a value",
                field=override.key_or_group,
                got=override.input_line,
                allowed="one value",
                remedy="add -m, or quote the value if it is one text with commas",
            )
    last = {s.override.key_or_group: s.override for s in said}
    once = [s.override for s in said if last[s.override.key_or_group] is s.override]
    kept = check_keys(once, registry, root, folders)
    try:
        node = root_node(registry, root)
        with hydra_session(conf_dir(), node, defaults_list(registry, root), folders):
            composed = hydra_compose(ROOT_NAME, overrides=[str(o.input_line) for o in kept])
        config = OmegaConf.to_object(composed)
    except RequestError as error:  # of `sampling`, which is checked where it is made
        raise ConfigError(
            error.message, field=error.field, got=error.got, allowed=error.allowed, remedy=error.remedy
        ) from error
    except KVCoreError:
        raise  # from the __post_init__ of a dataclass of settings or options
    except (HydraException, OmegaConfBaseException) as error:
        raise _typed(error, kept, registry, root) from error
    except Exception as error:
        raise ConfigError(
            f"the options of a backend or plugin refuse their values: {told(error)}",
            field=", ".join(o.key_or_group for o in kept),
            got=[o.input_line for o in kept],
        ) from error
    if not isinstance(config, root):
        raise ConfigError("the presets do not follow the schema", field="conf", got=type(config))
    _check_backends(config, registry)
    origins = _preset_origins(root, kept, files)
    origins |= {s.override.key_or_group: s.origin for s in said}
    return Composed(config, frozenset(s.override.key_or_group for s in said), origins)


def _gathered(overrides: Sequence[str], files: Files) -> list[Said]:
    """Everything that is said, the strongest last."""
    typed = parse(overrides)
    from_file = parse(overrides_of(read_yaml(files.config, "--config"))) if files.config is not None else []
    names = [o for o in (*from_file, *typed) if o.key_or_group == EXPERIMENT and not o.is_sweep_override()]
    chosen = str(names[-1].value()) if names else None
    preset = parse(experiment_overrides(chosen, files.folders())) if chosen is not None else []
    for override in (*preset, *from_file):
        if override.key_or_group == "output":
            raise ConfigError("output is said on the command line", field="output", got=override.input_line)
    by_hand = {o.key_or_group for o in typed}
    values = {o.key_or_group: o for o in preset}
    for override in from_file:
        other = values.get(override.key_or_group)
        if other is not None and other.value() != override.value() and override.key_or_group not in by_hand:
            raise ConfigError(
                f"two files say {override.key_or_group}",
                field=override.key_or_group,
                got=[f"{files.config}: {override.input_line}", f"experiment={chosen}: {other.input_line}"],
                allowed="one value",
                remedy=f"remove one, or type {override.key_or_group}=VALUE, which wins over both",
            )
    layers = ((preset, f"experiment={chosen}"), (from_file, f"--config {files.config}"), (typed, TYPED))
    return [Said(o, origin) for found, origin in layers for o in found if o not in names]


def _check_backends(config: Root, registry: Registry) -> None:
    """Backends that are named must be there."""
    named = {"backend": getattr(config, "backend", "auto")}
    kinds = getattr(config, "backend_by_kind", None)
    if kinds is not None:
        named |= {f"backend_by_kind.{f.name}": getattr(kinds, f.name) for f in fields(kinds)}
    for key, name in named.items():
        if isinstance(name, str) and name != "auto":
            registry.backend(name, key=key)


def _preset_origins(root: type[Root], kept: Sequence[Override], files: Files) -> dict[str, str]:
    """The keys that presets set."""
    chosen = {f.name: f.metadata["preset"] for f in fields(root) if f.metadata.get("preset")}
    chosen |= {o.key_or_group: str(o.value()) for o in kept if o.key_or_group in chosen or "/" in o.key_or_group}
    found: dict[str, str] = {}
    for group, name in chosen.items():
        content = read_yaml(str(preset_files(group, files.folders())[name]), group)
        found |= {f"{group.replace('/', '.')}.{key}": f"{group}={name}" for key in content}
    return found


def _typed(error: Exception, said: Sequence[Override], registry: Registry, root: type[Root]) -> ConfigError:
    """Hydra's exception in our words, without the names of its classes; the innermost cause tells most."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    field: Any = getattr(cause, "full_key", None)
    if field is None:
        field = next((line[len("full_key: ") :] for line in lines if line.startswith("full_key: ")), None)
    field = field.partition("[")[0] if field else field  # an element of a list
    mine = next((o for o in said if o.key_or_group == field), None)
    expected = next((k.type for k in all_keys(registry, root) if k.path == field), None)
    field = field or (said[-1].key_or_group if len(said) == 1 else None)
    kind: type[ConfigError] = ConfigError
    if isinstance(cause, InterpolationResolutionError):
        message = "the value refers by ${...} to something that is not there"
    elif isinstance(cause, ConfigKeyError) or any(line.startswith("Key '") for line in lines):
        kind, message = UnknownKeyError, f"there is no key {field}"
    else:
        message = f"{field or 'a value'} does not take a value of this type"
    return kind(
        message,
        field=field,
        got=mine.input_line if mine else None,
        allowed=expected,
        remedy="`kvcore COMMAND --help` shows the type of every key",
    )
