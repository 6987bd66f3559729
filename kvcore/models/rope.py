"""Rotary settings, and the longest sequence that they and the trained length give together.

The rule is the one of transformers' `modeling_rope_utils` (which lengths a type speaks of) and of vLLM's
`_get_and_verify_max_len` (what an engine then serves):

- none, ``llama3``, ``longrope``, ``proportional``: `max_position_embeddings` already counts the scaling.
- ``linear``, ``dynamic``: `max_position_embeddings` times `factor`; Gemma 3's counts it already.
- ``yarn``: `original_max_position_embeddings` times `factor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields

# Each type and the settings that transformers refuses to do without.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "axial": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
}
COUNTED_ALREADY = ("gemma3_text", "gemma3n_text")


def rope_settings(fields: Fields) -> Mapping[str, Any]:
    """The rope settings under their old name or the new one; those of full layers where they differ by kind."""
    # The order is transformers': a `rope_scaling` that is given wins.
    rope = fields.mapping("rope_scaling", "rope_parameters")
    nested = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
    if not nested:
        return rope
    return dict(nested.get("full_attention", next(iter(nested.values()))))


def rope_type(fields: Fields) -> str:
    """``default``, ``yarn``, ``longrope``, ``dynamic``, ...

    Raises:
        ModelError: transformers knows no such type.
    """
    rope = rope_settings(fields)
    given = rope.get("rope_type")
    given = rope.get("type", "default") if given is None else given
    if not isinstance(given, str) or given not in NEEDS:
        raise ModelError("unknown type of rope", field="rope_parameters.rope_type", got=given, allowed=sorted(NEEDS))
    return given


def longest_sequence(fields: Fields, trained: int) -> int:
    """The longest sequence of a model whose config gives a length of `trained` tokens.

    Raises:
        ModelError: A setting that the type needs is missing or no usable number.
    """
    kind, rope = rope_type(fields), Fields(rope_settings(fields), nested=False)
    for name in NEEDS[kind]:
        if rope.get(name) is None:
            raise ModelError(
                f"rope of type {kind} lacks {name}",
                field=f"rope_parameters.{name}",
                got=None,
                allowed="a list of numbers" if name.startswith(("short", "long")) else "a number",
            )
    outside = fields.optional("original_max_position_embeddings")
    original = outside if outside is not None else rope.optional("original_max_position_embeddings")
    if kind in ("longrope", "su"):
        for name in NEEDS[kind]:
            for value in rope.listing(name) or ():
                Fields({name: value}, nested=False).number(name)
    if kind in ("llama3", "longrope", "su") and original is not None and original > trained:
        raise ModelError(
            "rope is scaled from a length beyond the model's own",
            field="rope_parameters.original_max_position_embeddings",
            got=original,
            allowed=f"up to max_position_embeddings = {trained}",
        )
    if rope.get("factor") is None:
        return trained
    factor = rope.number("factor")
    if kind not in ("linear", "dynamic", "yarn") or (kind == "linear" and fields.model_type in COUNTED_ALREADY):
        return trained
    if factor < 1:
        raise ModelError("rope is scaled by less than 1", field="rope_parameters.factor", got=factor, allowed=">= 1")
    return Fields({"longest": int((original or trained) * factor)}, nested=False).integer("longest")
