"""From a composed configuration to what the engine is built from. No torch, unless the device needs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvcore.attention.declaration import DeviceFacts
from kvcore.config.compose import Composed
from kvcore.config.devices import device_facts
from kvcore.config.home import user_path
from kvcore.config.priorities import priorities
from kvcore.config.schema import DeviceRoot, GeneratingKeys, ModelKeys, ModelRoot, RankedKeys, ServedRoot
from kvcore.config.stated import as_stated
from kvcore.config.weights import has_experts, stored_weights
from kvcore.engine.planning import check_run, eviction_policy
from kvcore.engine.settings import BackendChoice, CacheSettings, EngineSettings
from kvcore.errors import ConfigError
from kvcore.models.config_json import config_file, read_config
from kvcore.models.facts import ModelAdapter, ModelFacts
from kvcore.models.families import adapters_by_type, model_facts
from kvcore.models.gguf import Progress
from kvcore.models.hub import from_hub, is_hub_id
from kvcore.models.parameters.shares import StoredWeights
from kvcore.models.stated_cache import HF_SECTION, cache_statement, read_hf_quant_config
from kvcore.models.stored_as import stored_as
from kvcore.plan.ranks import Ranks
from kvcore.registry.registry import Registry
from kvcore.registry.select import Purpose

log = logging.getLogger("kvcore")


@dataclass(frozen=True)
class Built:
    """What a command on a model needs.

    Attributes:
        settings: For the engine and the planner.
        chat: Whether prompts go through the chat template.
        model: Name of the model, for people.
        notes: What people should know, such as a limit that was passed.
    """

    settings: EngineSettings
    chat: bool
    model: str
    notes: tuple[str, ...]


# Presets that are no description: the machine is asked.
MEASURED = ("auto", "cpu", "cuda")


def build(
    composed: Composed[ModelRoot],
    registry: Registry,
    *,
    purpose: Purpose,
    progress: Progress | None = None,
    geometry: Mapping[str, Any] | None = None,
) -> Built:
    """Settings of a configuration.

    Args:
        composed: The configuration.
        registry: Installed plugins: their model adapters and options are used.
        purpose: ``run`` makes sure that the weights are there (a preset's are fetched and converted once)
            and refuses lengths beyond the model's own limit; ``plan`` reads the geometry alone and warns.
        progress: Called as ``progress(what, fraction)`` while a preset's weights are fetched.
        geometry: The content of `config.json`, where the caller has the model, weights included: none are looked for.

    Raises:
        ConfigError, ModelError: As they say.
    """
    config = composed.config
    model = _model(composed)
    device = device_of(composed, ask_torch=purpose == "run", present=purpose == "run")
    held, geometry = geometry is not None, _geometry(model) if geometry is None else geometry
    eviction_policy(config.cache, registry)
    adapters = _adapters(registry)

    def settings_of(cache: CacheSettings) -> EngineSettings:
        facts = model_facts(geometry, dtype=_dtype(model, device), cache=cache, adapters=adapters)
        facts = stored_as(
            facts,
            content=cache.content,
            retention=cache.retention,
            contents=registry.contents,
            retentions=registry.retentions,
        )
        longest = _max_model_len(config.engine.max_model_len, facts, purpose)
        return EngineSettings(
            facts=facts.within(longest),
            model_path=model.path,
            device=device,
            cache=cache,
            backend=_choice(config),
            engine=replace(config.engine, max_model_len=longest),
            ranks=config.parallel if isinstance(config, RankedKeys) else Ranks(),
        )

    settings = as_stated(settings_of, config.cache, cache_statement(geometry), registry, purpose)
    # Weights take long to open; to a run their size is told only where the cache is what they leave of a device.
    given = config.cache.memory is not None or config.cache.num_blocks is not None
    read = purpose == "plan" or not (given or device.kind == "cpu")
    weights = stored_weights(model, settings.facts, geometry, adapters, read=read)
    facts = replace(settings.facts, weight_bytes=weights.total if isinstance(weights, StoredWeights) else None)
    settings = replace(settings, facts=facts, weights=weights)
    notes = []
    if settings.engine.max_model_len > facts.max_model_len:
        notes.append(
            f"engine.max_model_len={settings.engine.max_model_len} is beyond the model's own limit of "
            f"{facts.max_model_len}: it can be planned, but not run"
        )
        log.warning("%s", notes[0])
    if purpose == "plan" and has_experts(geometry):
        notes.append("expert and data parallel are not planned: tensor ranks share out each expert")
    if purpose == "run":
        check_run(settings, registry)  # first: a bad choice must not cost a download
        if not held:
            settings = replace(settings, model_path=_directory(config.model.path, model, progress))
    said = config.chat if isinstance(config, GeneratingKeys) else "auto"
    chat = bool(model.chat) if said == "auto" else said == "true"
    return Built(settings, chat, model.name or "unnamed", (*facts.notes, *notes))


def device_of(composed: Composed[DeviceRoot], *, ask_torch: bool = False, present: bool = False) -> DeviceFacts:
    """The device that a configuration names; `present` where kernels will run on it.

    Raises:
        ConfigError: It is not here, or facts of a description are given beside a device that is found.
    """
    keys = composed.config.device
    told = sorted(k for k in composed.given if k.startswith("device."))
    if told and keys.preset in MEASURED:
        raise ConfigError(
            "facts of a device are given beside a preset that describes one, and nowhere else",
            field=told[0],
            got=getattr(keys, told[0].removeprefix("device.")),
            allowed="with device=PRESET, not auto, cpu or cuda",
            remedy="add the preset that is nearest, such as device=h100-80gb",
        )
    facts = device_facts(keys, ask_torch=ask_torch)
    if present and not facts.present:
        raise ConfigError(
            "kernels run here: it needs a device that is here, and this is a preset for planning",
            field="device",
            got=keys.preset,
            allowed="auto, cpu or cuda",
        )
    return facts


def _choice(config: ModelRoot) -> BackendChoice:
    options = dict(config.backends)
    if not isinstance(config, ServedRoot):
        return BackendChoice(options=options, priorities=priorities())
    kinds = {f.name: getattr(config.backend_by_kind, f.name) for f in fields(config.backend_by_kind)}
    named = {kind: name for kind, name in kinds.items() if name != "auto"}
    return BackendChoice(config.backend, named, options, priorities())


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


def _model(composed: Composed[ModelRoot]) -> ModelKeys:
    """The model's keys; with `model.path`, the preset's no longer count, unless they were given by hand."""
    model = composed.config.model
    if model.path is None:
        return model
    path = user_path("model.path", model.path)
    if _on_the_hub(model.path):
        path = from_hub(model.path, weights=False)
    given = {k.removeprefix("model.").partition(".")[0] for k in composed.given if k.startswith("model.")}
    kept = {f.name: getattr(model, f.name) for f in fields(model) if f.name in given}
    return ModelKeys(**{**kept, "name": kept.get("name") or _called(model.path, path), "path": str(path)})


def _on_the_hub(text: str) -> bool:
    """Whether a path names a model of the hub; a folder of that name goes first."""
    return is_hub_id(text) and not user_path("model.path", text).exists()


def _called(text: str, path: Path) -> str:
    """What a model of this path is called."""
    if _on_the_hub(text):
        return text.rpartition("/")[2]
    return path.parent.name if path.name == "config.json" else path.name


def _directory(given: str | None, model: ModelKeys, progress: Progress | None) -> str:
    """The directory with weights; a preset's is made on the first run, one of the hub is fetched."""
    if given is not None and _on_the_hub(given):
        return str(from_hub(given, weights=True))
    if model.path is not None:
        path = Path(model.path)
        return str(path if path.is_dir() else path.parent)
    from kvcore.models.home import ensure_model  # late: conversion needs numpy

    return str(ensure_model(model.name or "model", model.package or "", progress))


def _dtype(model: ModelKeys, device: DeviceFacts) -> str | None:
    if model.dtype != "auto":
        return model.dtype
    return model.cpu_dtype if device.kind == "cpu" else None


def _max_model_len(asked: int | None, facts: ModelFacts, purpose: Purpose) -> int:
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
