"""Encoder-decoders: self attention beside cross attention over a fixed number of encoder tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.attention.query import Mask
from kvcore.errors import ModelError, Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import FamilyAdapter
from kvcore.models.parts import CachePart, Heads
from kvcore.settings.cache import CacheSettings


class Whisper(FamilyAdapter):
    """Whisper: `max_source_positions` audio frames are read by every decoder layer."""

    model_types = ("whisper",)
    length_field = "max_target_positions"  # the longest text, not the longest audio
    rotary = False

    def num_layers(self, fields: Fields) -> int:
        """Decoder layers; `num_hidden_layers` counts those of the encoder."""
        return fields.integer("decoder_layers")

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """Self attention, then cross attention."""
        heads, width = fields.integer("decoder_attention_heads"), fields.integer("hidden_size")
        if width % heads:
            raise ModelError(
                "the width is no multiple of the number of heads",
                field="decoder_attention_heads",
                got=f"{width} / {heads}",
                allowed="a whole number",
            )
        dim = width // heads
        frames = fields.integer("max_source_positions", 1500)
        yield Heads(heads, heads, dim)
        yield Heads(heads, heads, dim, mask=Mask(causal=False), role="cross", encoder_tokens=frames)

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """The decoder needs an encoder's output."""
        if not fields.flag("is_encoder_decoder"):
            yield Refusal("model_type", "whisper", reason="it is an encoder-decoder; run serves decoders")


ADAPTERS: tuple[type[ModelAdapter], ...] = (Whisper,)
