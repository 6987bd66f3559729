"""The weights of a configuration: the user's word, a preset's, the checkpoint's headers, or a formula. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcore.config.schema import ModelKeys
from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter, ModelFacts
from kvcore.models.families import adapters_by_type
from kvcore.models.parameters.shares import StoredWeights
from kvcore.models.parameters.stored import packing_of
from kvcore.models.stated_cache import quantization
from kvcore.models.weights import weight_bytes
from kvcore.settings.units import parse_bytes
from kvcore.spec.dtypes import nbytes

INSTEAD = "set model.weight_bytes, or give the cache itself: cache.memory=BYTES"


def stored_weights(
    model: ModelKeys,
    facts: ModelFacts,
    geometry: Mapping[str, Any],
    adapters: Sequence[type[ModelAdapter]],
    *,
    read: bool,
) -> StoredWeights | ModelError | None:
    """The weights where something tells their bytes; else the error that says what is missing, or None.

    In this order: `model.weight_bytes`, a preset's number of parameters, the headers of the checkpoint, the formula of
    the model's adapter. The formula also tells how ranks share what another source has told.

    Args:
        model: The keys `model.*`.
        facts: The model.
        geometry: Its parsed config.
        adapters: Adapters of plugins.
        read: Whether the headers of a checkpoint may be read, and the formula asked.
    """
    total, source = _told(model, facts, geometry, read=read)
    if not read:
        return None if total is None else StoredWeights(total, source)
    try:
        counted = _by_formula(facts, geometry, adapters)
    except ModelError as error:
        if total is None:
            error.remedy = error.remedy or INSTEAD
            return error
        counted = None
    if total is None:
        return counted
    return StoredWeights(total, source) if counted is None else replace(counted, total=total, source=source)


def _told(model: ModelKeys, facts: ModelFacts, geometry: Mapping[str, Any], *, read: bool) -> tuple[int | None, str]:
    """Bytes that someone has told, and who."""
    if model.weight_bytes is not None:
        return parse_bytes("model.weight_bytes", model.weight_bytes, least=1), "model.weight_bytes"
    if model.parameters is not None:
        return nbytes(facts.dtype, model.parameters), "model.parameters"
    if facts.weight_bytes is not None:
        return facts.weight_bytes, "the model's adapter"
    if not read or model.path is None:
        return None, ""
    path = Path(model.path)
    found = weight_bytes(
        path if path.is_dir() else path.parent,
        facts.dtype,
        tied=Fields(geometry).get("tie_word_embeddings") is True,
        quantized=bool(quantization(Fields(geometry))),
        layers=facts.num_layers,
    )
    return found, "the headers of the checkpoint"


def _by_formula(
    facts: ModelFacts, geometry: Mapping[str, Any], adapters: Sequence[type[ModelAdapter]]
) -> StoredWeights | None:
    fields = Fields(geometry)
    counted = adapters_by_type(adapters)[fields.model_type]().weights(geometry)
    return None if counted is None else StoredWeights.by_formula(counted, facts.dtype, packing_of(fields))


def has_experts(geometry: Mapping[str, Any]) -> bool:
    """Whether a config has layers with experts."""
    count = Fields(geometry).get("num_experts")
    return isinstance(count, int) and count > 1
