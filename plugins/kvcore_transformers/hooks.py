"""Hooks of a model that begin and end a pass on the cache that was given to it; without one they do nothing."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from kvcore.backend import ConfigError
from kvcore_transformers.attention import KEYWORD

if TYPE_CHECKING:
    from kvcore_transformers.cache import PagedCache

Kwargs = dict[str, Any]
_ATTACHED: WeakSet[torch.nn.Module] = WeakSet()


def attach(model: torch.nn.Module, kind: type[PagedCache]) -> None:
    """Let `model` take caches of this kind; may be called again."""
    if model not in _ATTACHED:
        model.register_forward_pre_hook(partial(_before, kind), with_kwargs=True)
        model.register_forward_hook(partial(_after, kind), with_kwargs=True, always_call=True)
        _ATTACHED.add(model)


def _before(kind: type[PagedCache], module: torch.nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    # A compiler that traces this line finds True; what it cannot trace, the call, it hands that value.
    return _begin(kind, module, args, kwargs, compiled=torch.compiler.is_compiling())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(
    kind: type[PagedCache], module: torch.nn.Module, args: tuple[Any, ...], kwargs: Kwargs, *, compiled: bool
) -> tuple[tuple[Any, ...], Kwargs] | None:
    given = _named(module, args, kwargs)
    cache = _cache_of(given)
    if not isinstance(cache, kind) or KEYWORD in kwargs:  # none, or a module around this one has begun the pass
        return None
    if compiled:
        raise ConfigError(
            "a PagedCache does not serve this call", field="torch.compile", got="a compiled model", allowed="the model"
        )
    return args, {**kwargs, KEYWORD: cache.begin(module, given)}


def _after(kind: type[PagedCache], module: torch.nn.Module, args: tuple[Any, ...], kwargs: Kwargs, output: Any) -> None:
    cache = _cache_of(_named(module, args, kwargs))
    if isinstance(cache, kind) and cache.model is module:
        cache.end(finished=output is not None)


def _named(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Kwargs:
    """What a call was given, by name."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs} if args else kwargs


def _cache_of(given: Kwargs) -> Any:
    """The cache, by its name of old as well."""
    return next((given[name] for name in ("cache", "past_key_values") if given.get(name) is not None), None)
