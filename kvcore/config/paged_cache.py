"""`kvcore.PagedCache`: a cache for one model, without our engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Self

import torch

from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.config.schema import ServedRoot
from kvcore.config.sources import overrides_of, said
from kvcore.engine.control_plane import make_manager
from kvcore.engine.planning import prepare_plan
from kvcore.engine.settings import CacheSettings, EngineSettings, Limits
from kvcore.errors import ConfigError
from kvcore.manage.manager import KVCacheManager
from kvcore.memory.arena import usable_bytes
from kvcore.models.facts import ModelFacts
from kvcore.models.transformers_bridge import attention_tensors
from kvcore.plan.planner import Plan
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.spec.cache_spec import CacheId
from kvcore.worker import paged_cache
from kvcore.worker.bound_attention import Parameters


class PagedCache(paged_cache.PagedCache):
    """A `kvcore.worker.paged_cache.PagedCache` that was planned for a model; see `for_model`.

    Attributes:
        plan: The plan.
        facts: What the model asks of its caches.
        limits: Longest sequence, most tokens and sequences of a step.
    """

    plan: Plan
    facts: ModelFacts
    limits: Limits
    _settings: EngineSettings
    _registry: Registry

    @classmethod
    def for_model(
        cls,
        model: str | PathLike[str] | Mapping[str, Any] | torch.nn.Module,
        *,
        backend: str | None = None,
        backend_by_kind: Mapping[str, str] | None = None,
        backends: Mapping[str, Any] | None = None,
        cache: CacheSettings | Mapping[str, Any] | None = None,
        engine: Limits | Mapping[str, Any] | None = None,
        device: str | None = None,
        dtype: str | None = None,
        parameters: Parameters | None = None,
        memory: torch.Tensor | None = None,
        registry: Registry | None = None,
    ) -> Self:
        """Plan a cache for a model, allocate it (or lie down in `memory`) and bind its backends.

        Args:
            model: A transformers model (or any module whose ``config.to_dict()`` is the content of its
                `config.json`), that content itself, or the folder, file or hub name of a `config.json`. No weights
                are read.
            backend: Who serves it; the key so called.
            backend_by_kind: Likewise.
            backends: Options of backends, likewise.
            cache: The keys ``cache.*`` as a dictionary, or an instance of the class that checks them.
            engine: The keys ``engine.*``, likewise.
            device: ``cpu`` or ``cuda``; None follows a module, else the machine.
            dtype: Element type of queries, keys and values; None follows a module, else the `config.json`.
            parameters: For a cache, the layer's own tensors; None takes those of a module.
            memory: Memory to lie in that somebody else allocated, one contiguous tensor on the device; the cache takes
                as much of it as whole blocks need, and `cache.memory` and `cache.num_blocks` stay unset.
            registry: Plugins; None takes the installed ones.

        Raises:
            KVCoreError: As `kvcore run` would print it: the model, a key, the backends, or too few bytes.
        """
        known = installed() if registry is None else registry
        geometry, path = _config_of(model)
        if isinstance(model, torch.nn.Module):
            weight = next(model.parameters())
            device = device or weight.device.type
            dtype = dtype or str(weight.dtype).removeprefix("torch.")
        named = {
            "backend": backend,
            "backend_by_kind": backend_by_kind,
            "backends": backends,
            "cache": cache,
            "engine": engine,
            "device": device,
        }
        words = overrides_of({name: value for name, value in named.items() if value is not None})
        words += [_lying_in(memory, words)] if memory is not None else []
        words += [f"model.path={said(path)}"] if path is not None else []
        words += [f"model.dtype={dtype}"] if dtype is not None else []
        composed = compose(words, known, ServedRoot)
        settings = build(composed, known, purpose="run", geometry=geometry).settings
        found, _ = prepare_plan(settings, known, purpose="run")
        found.require_fit()
        queries = settings.facts.queries

        def own(cache_id: CacheId) -> Mapping[str, torch.Tensor]:
            return attention_tensors(model, cache_id, queries[cache_id]) if isinstance(model, torch.nn.Module) else {}

        made = cls(
            found.configs[0],
            queries,
            settings.engine,
            known,
            device=settings.device.kind if settings.device.kind == "cpu" else "cuda",
            options=settings.backend.options,
            parameters=parameters or own,
            memory=memory,
            sanitize=settings.cache.sanitize,
        )
        made.plan, made.facts, made.limits = found, settings.facts, settings.engine
        made._settings, made._registry = settings, known
        return made

    def make_manager(self) -> KVCacheManager:
        """A manager of this cache's blocks, as `cache.*` asks for it; its steps go to `begin_allocated`."""
        return make_manager(self._settings, self.config, self._registry)


def _config_of(
    model: str | PathLike[str] | Mapping[str, Any] | torch.nn.Module,
) -> tuple[dict[str, Any] | None, str | None]:
    """(content of `config.json`, None) or (None, where it lies)."""
    if isinstance(model, torch.nn.Module):
        config = getattr(model, "config", None)
        if not callable(getattr(config, "to_dict", None)):
            raise ConfigError(
                "this module does not say what it is made of",
                field="model",
                got=type(model).__name__,
                allowed="a module with config.to_dict()",
                remedy="give the content of its config.json as a dictionary",
            )
        return dict(config.to_dict()), None  # type: ignore[union-attr]
    if isinstance(model, Mapping):
        return dict(model), None
    return None, str(model)


def _lying_in(memory: torch.Tensor, words: Sequence[str]) -> str:
    """The override that plans the cache for this memory; `words` are those of the caller."""
    for word in words:
        key, _, value = word.partition("=")
        if key in ("cache.memory", "cache.num_blocks"):
            raise ConfigError(
                "the memory that is given tells the size of the cache already",
                field=key,
                got=value,
                allowed="unset beside memory",
            )
    return f"cache.memory={usable_bytes(memory)}"
