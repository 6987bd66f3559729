"""From a composed configuration to what the engine is built from. No torch, unless the device needs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvcore.attention.spec import DeviceFacts
from kvcore.config.compose import Composed
from kvcore.config.devices import device_facts
from kvcore.config.home import user_path
from kvcore.config.priorities import priorities
from kvcore.config.schema import CacheKeys, KVCoreConfig, ModelKeys
from kvcore.config.stated import as_stated
from kvcore.config.units import parse_bytes
from kvcore.config.validate import MOST
from kvcore.engine.planning import check_run, eviction_policy
from kvcore.engine.settings import BackendChoice, CacheSettings, EngineSettings, SamplingParams
from kvcore.errors import ConfigError
from kvcore.models.config_json import Fields, config_file, read_config
from kvcore.models.facts import CacheChoice, ModelAdapter, ModelFacts
from kvcore.models.families import adapters_by_type, model_facts
from kvcore.models.gguf import Progress
from kvcore.models.stated_cache import HF_SECTION, cache_statement, quantization, read_hf_quant_config
from kvcore.models.stored_as import stored_as
from kvcore.models.weights import weight_bytes
from kvcore.registry.registry import Registry
from kvcore.registry.select import Purpose
from kvcore.spec.dtypes import nbytes

log = logging.getLogger("kvcore")


@dataclass(frozen=True)
class Built:
    """Everything that a command needs.

    Attributes:
        settings: For the engine and the planner.
        sampling: For generation.
        chat: Whether prompts go through the chat template.
        model: Name of the model, for people.
        notes: What people should know, such as a limit that was passed.
    """

    settings: EngineSettings
    sampling: SamplingParams
    chat: bool
    model: str
    notes: tuple[str, ...]


# Presets that are no description: the machine is asked.
MEASURED = ("auto", "cpu", "cuda")


def build(composed: Composed, registry: Registry, *, purpose: Purpose, progress: Progress | None = None) -> Built:
    """Settings of a configuration.

    Args:
        composed: The configuration.
        registry: Installed plugins: their model adapters and options are used.
        purpose: ``run`` makes sure that the weights are there (a preset's are fetched and converted once)
            and refuses lengths beyond the model's own limit; ``plan`` reads the geometry alone and warns.
        progress: Called as ``progress(what, fraction)`` while a preset's weights are fetched.

    Raises:
        ConfigError, ModelError: As they say.
    """
    config = composed.config
    model = _model(composed)
    _check_device_keys(composed)
    device = device_facts(config.device, ask_torch=purpose == "run")
    if purpose == "run" and not device.present:
        raise ConfigError(
            "this device is a preset for planning: it is not in this machine",
            field="device",
            got=config.device.preset,
            allowed="auto, cpu or cuda",
        )
    geometry = _geometry(model)
    cache = _cache(config.cache)
    eviction_policy(cache, registry)
    adapters = _adapters(registry)

    def settings_of(cache: CacheSettings) -> EngineSettings:
        facts = model_facts(geometry, dtype=_dtype(model, device), cache=cache.choice, adapters=adapters)
        facts = stored_as(
            facts,
            content=config.cache.content,
            retention=config.cache.retention,
            contents=registry.contents,
            retentions=registry.retentions,
        )
        length = _max_model_len(config, facts, purpose)
        return EngineSettings(
            facts=facts.within(length),
            model_path=model.path,
            device=device,
            cache=cache,
            backend=BackendChoice(
                config.backend, _by_kind(config.backend_by_kind), dict(config.backends), priorities()
            ),
            max_model_len=length,
            max_num_seqs=config.engine.max_num_seqs,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
        )

    settings = as_stated(settings_of, cache, cache_statement(geometry), registry, purpose)
    # Weights take long to open; to a run their size is told only where the cache is what they leave of a device.
    given = cache.memory_bytes is not None or cache.num_blocks is not None
    read = purpose == "plan" or not (given or device.kind == "cpu")
    facts = replace(settings.facts, weight_bytes=_weight_bytes(model, settings.facts, geometry, read=read))
    settings = replace(settings, facts=facts)
    notes = []
    if settings.max_model_len > facts.max_model_len:
        notes.append(
            f"engine.max_model_len={settings.max_model_len} is beyond the model's own limit of {facts.max_model_len}: "
            "it can be planned, but not run"
        )
    sampling = config.sampling
    if purpose == "run":
        check_run(settings, registry)  # first: a bad choice must not cost a download
        settings = replace(settings, model_path=_directory(model, progress))
    for note in notes:
        log.warning("%s", note)
    return Built(settings, sampling, _chat(config.chat, model), _name(model), (*facts.notes, *notes))


def _adapters(registry: Registry) -> tuple[type[ModelAdapter], ...]:
    """The plugins' model adapters; one that claims a model type that is taken is left out, with a warning."""
    taken, kept = set(adapters_by_type()), []
    for adapter in list(registry.model_adapters):
        clash = taken.intersection(adapter.model_types)
        if clash:
            registry.refuse_adapter(adapter, f"model type {', '.join(sorted(clash))} has an adapter already")
        else:
            taken.update(adapter.model_types)
            kept.append(adapter)
    return tuple(kept)


def _model(composed: Composed) -> ModelKeys:
    """The model's keys; with `model.path`, the preset's no longer count, unless they were given by hand."""
    model = composed.config.model
    if model.path is None:
        return model
    given = {k.removeprefix("model.").partition(".")[0] for k in composed.given if k.startswith("model.")}
    kept = {f.name: getattr(model, f.name) for f in fields(model) if f.name in given}
    return ModelKeys(**{**kept, "path": str(user_path("model.path", model.path))})


def _check_device_keys(composed: Composed) -> None:
    """A device that is found has its own facts: keys of a description would change nothing."""
    preset = composed.config.device.preset
    told = sorted(k for k in composed.given if k.startswith("device."))
    if "device.preset" in told or (told and preset in MEASURED):
        raise ConfigError(
            "facts of a device are given beside a preset that describes one, and nowhere else",
            field=told[0],
            got=getattr(composed.config.device, told[0].removeprefix("device.")),
            allowed="with device=PRESET, not auto, cpu or cuda",
            remedy="add the preset that is nearest, such as device=h100-80gb",
        )


def _name(model: ModelKeys) -> str:
    if model.name or not model.path:
        return model.name or "unnamed"
    path = Path(model.path)
    return path.parent.name if path.name == "config.json" else path.name


def _directory(model: ModelKeys, progress: Progress | None) -> str:
    """The directory with weights; a preset's is made on the first run."""
    if model.path is not None:
        path = Path(model.path)
        return str(path if path.is_dir() else path.parent)
    from kvcore.models.home import ensure_model  # late: conversion needs numpy

    return str(ensure_model(model.name or "model", model.package or "", progress))


def _dtype(model: ModelKeys, device: DeviceFacts) -> str | None:
    if model.dtype != "auto":
        return model.dtype
    return model.cpu_dtype if device.kind == "cpu" else None


def _weight_bytes(model: ModelKeys, facts: ModelFacts, geometry: Mapping[str, Any], *, read: bool) -> int | None:
    """Bytes of the weights, or None where nothing tells; `read` is whether a checkpoint's headers may."""
    if model.weight_bytes is not None:
        return parse_bytes("model.weight_bytes", model.weight_bytes, least=1)
    if model.parameters is not None:
        return nbytes(facts.dtype, model.parameters)
    if read and model.path is not None and facts.weight_bytes is None:
        path = Path(model.path)
        return weight_bytes(
            path if path.is_dir() else path.parent,
            facts.dtype,
            tied=Fields(geometry).get("tie_word_embeddings") is True,
            quantized=bool(quantization(Fields(geometry))),
            layers=facts.num_layers,
        )
    return facts.weight_bytes


def _chat(value: str, model: ModelKeys) -> bool:
    return bool(model.chat) if value == "auto" else value.lower() == "true"


def _max_model_len(config: KVCoreConfig, facts: ModelFacts, purpose: Purpose) -> int:
    asked = config.engine.max_model_len
    if asked is not None and asked > facts.max_model_len and purpose == "run":
        raise ConfigError(
            "the model was not made for sequences of this length",
            field="engine.max_model_len",
            got=asked,
            allowed=f"1 to {facts.max_model_len}",
        )
    return asked or facts.max_model_len


def _geometry(model: ModelKeys) -> dict[str, Any]:
    """The config of the model, and what a quantizer wrote beside it."""
    if model.path is None:
        return dict(model.geometry)
    beside = read_hf_quant_config(config_file(model.path).parent)
    return {**read_config(model.path), **({HF_SECTION: beside} if beside else {})}


def _cache(keys: CacheKeys) -> CacheSettings:
    block_size: int | None = None
    if keys.block_size != "auto":
        try:
            block_size = int(keys.block_size)
        except ValueError:
            block_size = 0
        if not 1 <= block_size <= MOST:
            raise ConfigError(
                "cache.block_size is not a positive number of tokens",
                field="cache.block_size",
                got=keys.block_size,
                allowed=f"auto, or a number from 1 to {MOST}",
            )
    return CacheSettings(
        block_size=block_size,
        placement=keys.placement,
        memory_bytes=None if keys.memory is None else parse_bytes("cache.memory", keys.memory, least=1),
        num_blocks=keys.num_blocks,
        utilization=keys.utilization,
        prefix_caching=keys.prefix_caching,
        salt=keys.salt,
        hash=keys.hash,
        eviction=keys.eviction,
        sanitize=keys.sanitize,
        choice=CacheChoice(
            dtype=None if keys.dtype == "auto" else keys.dtype,
            dtype_by_kind=_by_kind(keys.dtype_by_kind),
            scales=keys.scales,
            mla="latent" if keys.mla == "auto" else keys.mla,
        ),
    )


def _by_kind(node: Any) -> Mapping[str, str]:
    """What differs from auto, by kind."""
    return {f.name: getattr(node, f.name) for f in fields(node) if getattr(node, f.name) != "auto"}
