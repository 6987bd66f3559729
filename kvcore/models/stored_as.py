"""Contents and retentions of plugins in place of the ones that a model's facts name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kvcore.errors import ConfigError, PluginError
from kvcore.models.facts import CacheFacts, ModelFacts
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import Content
from kvcore.spec.retention import Retention

_Kind = TypeVar("_Kind", Content, Retention)
# Positions at which a retention is held against the one that it replaces.
_PROBES = (*range(260), 511, 1_000, 4_095, 10_000, 100_000)


def stored_as(
    facts: ModelFacts,
    *,
    content: str = "auto",
    retention: str = "auto",
    contents: Mapping[str, type[Content]],
    retentions: Mapping[str, type[Retention]],
) -> ModelFacts:
    """The facts with every cache stored as asked, where the class asked for can take its place.

    The content becomes part of each layer's query, so that a backend which does not know it refuses.

    Args:
        facts: The model.
        content: Kind of content, or ``auto`` for what the model's adapter says.
        retention: Kind of retention, or ``auto``.
        contents: What is installed, by kind.
        retentions: What is installed, by kind.

    Raises:
        ConfigError: No such kind is installed, or it can stand in for no cache of the model.
        PluginError: A retention gives up tokens that its layer still reads.
    """
    new_content = known_kind("cache.content", content, contents)
    new_retention = known_kind("cache.retention", retention, retentions)
    caches = tuple(_replaced(c, new_content, new_retention) for c in facts.caches)
    for key, kind, part in (("content", content, "content"), ("retention", retention, "retention")):
        before, after = ([getattr(c.spec, part) for c in found] for found in (facts.caches, caches))
        if kind != "auto" and before == after:
            raise ConfigError(
                f"no cache of this model can be stored as {kind}",
                field=f"cache.{key}",
                got=kind,
                allowed="auto",
                remedy=f"leave out cache.{key}: its caches are {', '.join(sorted({b.kind for b in before}))}",
            )
    return replace(facts, caches=caches)


def known_kind(key: str, kind: str, installed: Mapping[str, type[_Kind]]) -> type[_Kind] | None:
    """The class that a kind asks for; None for ``auto``.

    Raises:
        ConfigError: No such kind is installed.
    """
    if kind == "auto":
        return None
    if kind not in installed:
        raise ConfigError(
            "no installed plugin offers this kind", field=key, got=kind, allowed=["auto", *sorted(installed)]
        )
    return installed[kind]


def _replaced(cache: CacheFacts, content: type[Content] | None, retention: type[Retention] | None) -> CacheFacts:
    spec, query = cache.spec, cache.query
    stored = None if content is None else content.instead_of(spec.content)
    if stored is not None:
        spec = KVCacheSpec(stored, spec.retention)
        query = None if query is None else replace(query, content=stored.kind)
    kept = None if retention is None else retention.instead_of(spec.retention)
    if kept is not None:
        _check_covers(kept, spec.retention)
        spec = KVCacheSpec(spec.content, kept)
    return replace(cache, spec=spec, query=query)


def _check_covers(new: Retention, old: Retention) -> None:
    for position in _PROBES:
        if new.first_needed(position) > old.first_needed(position):
            raise PluginError(
                f"retention {new.kind} gives up tokens that the layer still reads",
                field="cache.retention",
                got=f"first needed at {position}: {new.first_needed(position)}",
                allowed=f"<= {old.first_needed(position)}",
            )
