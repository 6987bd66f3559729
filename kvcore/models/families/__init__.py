"""From a parsed `config.json` to `ModelFacts`, by the adapter of its `model_type`. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.errors import ModelError, PluginError
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter, ModelFacts
from kvcore.models.families import compressed, decoder, encoder, latent, legacy, mamba2, recurrent, unproven, window
from kvcore.settings.cache import CacheSettings

BUILT_IN: tuple[type[ModelAdapter], ...] = (
    *decoder.ADAPTERS,
    *window.ADAPTERS,
    *latent.ADAPTERS,
    *compressed.ADAPTERS,
    *legacy.ADAPTERS,
    *recurrent.ADAPTERS,
    *mamba2.ADAPTERS,
    *encoder.ADAPTERS,
    *unproven.ADAPTERS,
)


def adapters_by_type(adapters: Sequence[type[ModelAdapter]] = ()) -> dict[str, type[ModelAdapter]]:
    """Every known model type and its adapter; those of plugins may not take a name that is taken.

    Args:
        adapters: Adapters of plugins (hook `kvcore_model_adapters`).

    Raises:
        PluginError: Two adapters claim one model type.
    """
    table: dict[str, type[ModelAdapter]] = {}
    for adapter in (*BUILT_IN, *adapters):
        for name in adapter.model_types:
            if name in table:
                raise PluginError(
                    f"two model adapters claim the model type {name}",
                    field="kvcore_model_adapters",
                    got=f"{table[name].__module__}.{table[name].__name__} and {adapter.__module__}.{adapter.__name__}",
                    remedy="uninstall one of the plugins",
                )
            table[name] = adapter
    return table


def model_facts(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    cache: CacheSettings | None = None,
    adapters: Sequence[type[ModelAdapter]] = (),
) -> ModelFacts:
    """What a `config.json` says about caches and attention.

    Args:
        config: The parsed file.
        dtype: `model.dtype`; None and ``auto`` follow the checkpoint.
        cache: The user's choices for every cache.
        adapters: Adapters of plugins.

    Returns:
        The facts; `refusals` says why `run` could not serve the model.

    Raises:
        ModelError: The model type is not known, or a field is missing or absurd.
    """
    table = adapters_by_type(adapters)
    fields = Fields(config)
    name = fields.model_type
    # The text part is read by its own type or not at all: an outer type says nothing on it.
    if name not in table:
        near = difflib.get_close_matches(name, table, n=5, cutoff=0.6)
        raise ModelError(
            f"no adapter knows the model type {name}" + (f"; near: {', '.join(near)}" if near else ""),
            field="model_type",
            got=name,
            allowed=near or f"one of {len(table)} model types (docs: Models)",
            remedy="offer a ModelAdapter for it by the plugin hook kvcore_model_adapters",
        )
    return table[name]().facts(config, dtype=dtype, cache=cache or CacheSettings())


__all__ = ["BUILT_IN", "adapters_by_type", "model_facts"]
