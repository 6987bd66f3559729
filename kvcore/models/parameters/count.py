"""The weights of a config: its recipe's, and those of the towers beside the text model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.parameters.recipes import RECIPES
from kvcore.models.parameters.towers import towers
from kvcore.models.parameters.weight import ModelWeights
from kvcore.models.parts import CachePart

# Layers that predict further tokens, in the spellings of configs.
SPECULATIVE = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def weights_of(fields: Fields, layers: Sequence[Sequence[CachePart]]) -> ModelWeights:
    """The weights that a config describes.

    Args:
        fields: Its fields.
        layers: The parts of each decoder layer, as its adapter describes them.

    Raises:
        ModelError: No recipe knows the model type, or a field that decides over gigabytes is missing.
    """
    recipe = RECIPES.get(fields.model_type)
    if recipe is None:
        raise ModelError(
            f"no formula tells the weights of {fields.model_type}",
            field="model_type",
            got=fields.model_type,
            allowed=sorted(RECIPES),
            remedy="set model.weight_bytes, or give the cache itself: cache.memory=BYTES",
        )
    found = recipe.weights(fields, layers)
    beside = towers(fields)
    notes = [f"the weights of {fields.types[0]}'s other modalities are counted"] if beside else []
    return replace(found, first=(*found.first, *beside), notes=(*notes, *speculative(fields)))


def speculative(fields: Fields) -> list[str]:
    """A note where the config has layers that predict further tokens: neither caches nor weights of them count."""
    many = {name: fields.inner[name] for name in SPECULATIVE if fields.inner.get(name)}
    return [f"layers that predict further tokens ({n}={v}) are not counted" for n, v in many.items()][:1]
