"""Decoders that can be planned alone: their caches are those of transformers, but no test has compared their text.

What each layer keeps follows from the same fields as in the families beside; `run` refuses them by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.decoder import FullAttention, UniformWindow
from kvcore.models.families.latent import LatentAttention
from kvcore.models.families.legacy import EveryHead
from kvcore.models.families.window import FULL, SLIDING, MixedLayers, Qwen
from kvcore.models.parts import CachePart, Heads
from kvcore.settings.cache import CacheSettings


class UnprovenFull(FullAttention):
    """Every layer keeps every token."""

    model_types = (
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "bitnet",
        "diffllama",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "exaone",
        "flex_olmo",
        "glm4v_moe_text",
        "glm4v_text",
        "glm_ocr_text",
        "granite_docling_text",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hunyuan_vl_text",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "molmo2_text",
        "nanochat",
        "nemotron",
        "paddleocr_vl_text",
        "sarvam_moe",
        "solar_open",
    )
    remote = frozenset()
    unproven = frozenset(model_types)


class UnprovenHeads(EveryHead):
    """As many KV heads as query heads."""

    model_types = ("biogpt", "ctrl", "gpt_neox_japanese", "persimmon", "xglm")
    unproven = frozenset(model_types)


class UnprovenLatent(LatentAttention):
    """Latents, as DeepSeek-V3 keeps them."""

    model_types = ("axk1", "sarvam_mla", "youtu")
    remote = frozenset()
    unproven = frozenset(model_types)


class UnprovenQwen(Qwen):
    """Later layers slide, if `use_sliding_window`."""

    model_types = ("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text")
    unproven = frozenset(model_types)


class UnprovenWindow(UniformWindow):
    """One window for all layers, where there is one."""

    model_types = ("phimoe", "qwen3_omni_moe_text")
    unproven = frozenset(model_types)


class UnprovenMixed(MixedLayers):
    """Windows beside full layers: as listed, else every so many-th layer is full.

    Attributes:
        periods: Without a list, the distance of full layers.
        first: Model types whose first layer of each period is the full one, and not the last.
        with_sinks: Model types whose heads have a sink.
    """

    model_types = (
        "afmoe",
        "beam",
        "cwm",
        "granite_swa",
        "granitemoe_swa",
        "kolibri1",
        "laguna",
        "mellum",
        "vaultgemma",
    )
    unproven = frozenset(model_types)
    periods: ClassVar[dict[str, int]] = {
        "afmoe": 4,
        "beam": 6,
        "cwm": 4,
        "granite_swa": 4,
        "granitemoe_swa": 4,
        "kolibri1": 5,
        "laguna": 1,
        "mellum": 1,
        "vaultgemma": 2,
    }
    first: ClassVar[frozenset[str]] = frozenset(("cwm", "granite_swa", "granitemoe_swa"))
    with_sinks: ClassVar[frozenset[str]] = frozenset(("granite_swa", "granitemoe_swa"))

    def default_type(self, fields: Fields, index: int) -> str:
        """By the period of the model type; Beam's last layer is full as well."""
        kind = fields.model_type
        period = fields.optional("global_attn_every_n_layers") or self.periods[kind]
        if kind in self.first:
            return SLIDING if index % period else FULL
        last = kind == "beam" and index == fields.layers - 1
        return FULL if last or (index + 1) % period == 0 else SLIDING

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One cache a layer, with its window."""
        sinks = fields.model_type in self.with_sinks
        yield Heads(fields.heads, fields.kv_heads, fields.head_dim, mask=self.mask(fields, index), sinks=sinks)


ADAPTERS: tuple[type[ModelAdapter], ...] = (
    UnprovenFull,
    UnprovenHeads,
    UnprovenLatent,
    UnprovenQwen,
    UnprovenWindow,
    UnprovenMixed,
)
