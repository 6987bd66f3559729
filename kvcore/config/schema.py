"""The roots: what each kind of work may be told, as frozen dataclasses that Hydra composes into. No Hydra here.

A command's root lies in the command's file and adds its own keys to one of these. `backends` and `plugins` are filled
in from the dataclasses of whatever is installed, see `kvcore.config.nodes`.
"""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvcore.engine.sampling import SamplingParams
from kvcore.errors import ConfigError
from kvcore.plan.capacity import Limits
from kvcore.plan.ranks import Ranks
from kvcore.settings.cache import DTYPES, CacheSettings
from kvcore.settings.key import check, key
from kvcore.settings.units import MOST_BYTES

# What is named but not built: the value that says "without it", and what to do.
Unbuilt = Mapping[str, tuple[str, str]]


ONE_RANK: Unbuilt = {f"parallel.{k}": ("1", "use one rank") for k in ("tensor", "pipeline", "decode_context")}


def node(kind: type, preset: str | None = None) -> Any:
    """A node of keys; `preset` is the file of ``conf/<name>/`` that fills it by default."""
    return field(default_factory=kind, metadata={"preset": preset})


@dataclass(frozen=True)
class ModelKeys:
    """The model; with `model.path` what the preset says of weights, geometry and chat no longer counts."""

    path: str | None = key(None, "Hugging Face directory, config.json or ORG/NAME on the hub; relative to the caller")
    dtype: str = key("auto", "dtype of weights and activations; auto: the checkpoint's", choices=DTYPES)
    weight_bytes: str | None = key(None, "bytes of the weights, where nothing else tells")
    name: str | None = key(None, "name shown to people")
    package: str | None = key(None, "package that brings a preset's weights, NAME==VERSION")
    chat: bool | None = key(None, "what chat=auto means")
    cpu_dtype: str | None = key(None, "what dtype=auto means on a CPU", choices=DTYPES)
    parameters: int | None = key(None, "number of weights", least=1, most=2**50)
    geometry: dict[str, Any] = key({}, "content of config.json, inline: any of its fields below this key")

    def __post_init__(self) -> None:
        check(self, "model")


@dataclass(frozen=True)
class DeviceKeys:
    """The device, as a file of conf/device describes it: choose one by `device=NAME`."""

    preset: str = key("auto", "name of the file")
    kind: str = key("auto", "kind of a described device", choices=("auto", "cpu", "cuda", "rocm"))
    name: str = key("", "its name")
    capability: list[int] | None = key(None, "its CUDA compute capability")
    arch: str = key("", "instruction set of a described ROCm device")
    memory_bytes: int | None = key(None, "total memory of a described device", least=1, most=MOST_BYTES)

    def __post_init__(self) -> None:
        check(self, "device")


@dataclass(frozen=True)
class BackendByKind:
    """Another backend for the groups of one kind."""

    full: str = key("auto", "backend of groups that keep every token")
    window: str = key("auto", "backend of sliding-window groups")
    chunk: str = key("auto", "backend of chunked-attention groups")
    latent: str = key("auto", "backend of latent (MLA) groups")
    encoder: str = key("auto", "backend of cross-attention groups")


@dataclass(frozen=True)
class Root:
    """What every command takes.

    Attributes:
        UNUSED: Keys of its nodes that change nothing in it: they are refused.
        UNBUILT: Keys of what is named but not built.
    """

    UNUSED: ClassVar[frozenset[str]] = frozenset()
    UNBUILT: ClassVar[Unbuilt] = {}

    output: str = key("text", "text, or exactly one JSON document on standard output", choices=("text", "json"))

    def __post_init__(self) -> None:
        check(self, "")


@dataclass(frozen=True)
class DeviceRoot(Root):
    """Work on this machine's backends."""

    device: DeviceKeys = node(DeviceKeys, "auto")
    backends: dict[str, Any] = key({}, "options of the installed backends")


@dataclass(frozen=True)
class ModelRoot(DeviceRoot):
    """Work on the cache of a model."""

    UNBUILT: ClassVar[Unbuilt] = {
        **ONE_RANK,
        "executor": ("inline", "use executor=inline"),
        "cache.swap_memory": ("0", "leave it at 0: a preempted request is computed again"),
        "cache.scale_file": ("null", "leave it out: tensor and head scales are 1.0"),
    }

    model: ModelKeys = node(ModelKeys, "smollm2-135m")
    cache: CacheSettings = node(CacheSettings)
    engine: Limits = node(Limits)


@dataclass(frozen=True)
class ServedRoot(ModelRoot):
    """Work on a model whose backends are chosen."""

    backend: str = key("auto", "attention backend of every group")
    backend_by_kind: BackendByKind = node(BackendByKind)


@dataclass(frozen=True)
class RankedKeys:
    """What is planned for several ranks."""

    parallel: Ranks = node(Ranks)


def without(unbuilt: Unbuilt, built: Unbuilt) -> Unbuilt:
    """What is named but not built, less what one kind of work has."""
    return {name: told for name, told in unbuilt.items() if name not in built}


@dataclass(frozen=True)
class GeneratingKeys:
    """What generation takes beside the model."""

    chat: str = key(
        "auto", "wrap prompts in the chat template; auto: what the preset says", choices=("auto", "true", "false")
    )
    plugins: dict[str, Any] = key({}, "options of the installed plugins")
    sampling: SamplingParams = node(SamplingParams)


@dataclass(frozen=True)
class EngineRoot(GeneratingKeys, RankedKeys, ServedRoot):
    """An engine: the keys of `kvcore.LLM`."""

    UNBUILT: ClassVar[Unbuilt] = without(ModelRoot.UNBUILT, ONE_RANK)

    def __post_init__(self) -> None:
        # `chat=true` arrives as the text "True".
        object.__setattr__(self, "chat", self.chat.lower())
        super().__post_init__()
        check_samples(self.sampling, self.engine)


def check_samples(sampling: SamplingParams, limits: Limits) -> None:
    """All samples of a prompt run at once."""
    if sampling.n > limits.max_num_seqs:
        raise ConfigError(
            "sampling.n is out of range",
            field="sampling.n",
            got=sampling.n,
            allowed=f"1 to {limits.max_num_seqs} (engine.max_num_seqs)",
        )


# Keys that act only where a cache is filled.
FILLING = (
    "sanitize",
    "prefix_caching",
    "partial_reuse",
    "salt",
    "hash",
    "eviction",
    "explain",
    "explain_history",
    "events",
)
FILLED = frozenset({"model.package", "model.chat", *(f"cache.{k}" for k in FILLING)})
