"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), compressed or expanded."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import ClassVar

from kvcore.errors import ModelError, Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import FamilyAdapter
from kvcore.models.parts import CachePart, Heads, Indexer, LatentHeads
from kvcore.models.rope import rope_settings, rope_type
from kvcore.settings.cache import CacheSettings


class LatentAttention(FamilyAdapter):
    """One latent of `kv_lora_rank` and a rotary key of `qk_rope_head_dim` a token and layer.

    With ``cache.mla=expanded`` the layer keeps keys and values of every head instead, as
    transformers' modules hand them over.
    """

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3", "minicpm3", "kimi_k2", "glm4_moe_lite")
    remote = frozenset({"kimi_k2"})

    def scale(self, fields: Fields) -> float:
        """``qk_head_dim ** -0.5``, times the square of the yarn correction where there is one."""
        scale = float(head_dim(fields) ** -0.5)
        rope = Fields(rope_settings(fields), nested=False)
        if rope_type(fields) == "default" or not rope.get("mscale_all_dim"):
            return scale
        factor = rope.number("factor", 1.0)
        correction = 0.1 * rope.number("mscale_all_dim") * log(factor) + 1.0 if factor > 1 else 1.0
        return scale * correction * correction

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """One latent, or keys and values of every head."""
        yield latent_part(fields, self.scale(fields), cache)


class LatentPairs(LatentAttention):
    """LongCat-Flash: two attentions in each of `num_layers` blocks."""

    model_types = ("longcat_flash",)

    def num_layers(self, fields: Fields) -> int:
        """Two caches a block."""
        blocks = fields.optional("num_layers")
        return 2 * blocks if blocks is not None else fields.layers


class SparseLatent(LatentAttention):
    """DeepSeek-V3.2, GLM-5: an indexer with keys of its own chooses the latents that are read."""

    model_types = ("deepseek_v32", "glm_moe_dsa")
    layer_kinds = ("deepseek_sparse_attention", "full_attention", "indexed_attention")

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """The latent, and the indexer's keys where the layer has an indexer of its own."""
        yield from super().layer(fields, index, cache)
        kinds = fields.once("indexers", lambda: indexer_types(fields))
        if kinds is None or kinds[index] == "full":
            yield Indexer(fields.integer("index_head_dim", 128))

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """The indexer's choice is no mask of ours."""
        yield Refusal("index_topk", fields.get("index_topk"), reason="a sparse indexer chooses the tokens it reads")


def head_dim(fields: Fields) -> int:
    """Dimension of an expanded query or key."""
    return fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")


def latent_part(fields: Fields, scale: float, cache: CacheSettings) -> CachePart:
    """The attention of one layer in the form that the user chose."""
    if cache.mla == "expanded":
        heads = fields.heads
        return Heads(heads, heads, head_dim(fields), fields.integer("v_head_dim"), scale=scale)
    return LatentHeads(fields.heads, fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim"), scale=scale)


def indexer_types(fields: Fields) -> list[str] | None:
    """``full`` or ``shared`` for each layer, or None where every layer has its own indexer."""
    listed: list[str] | None = fields.per_layer("indexer_types", ("full", "shared"), fields.layers)
    if listed is not None:
        return listed
    pattern = fields.get("index_topk_pattern")
    if isinstance(pattern, str):
        if len(pattern) != fields.layers or set(pattern) - {"F", "S"}:
            raise ModelError(
                "index_topk_pattern in config.json is not usable",
                field="index_topk_pattern",
                got=pattern,
                allowed="F or S for each layer",
            )
        return ["full" if c == "F" else "shared" for c in pattern]
    every = fields.integer("index_topk_freq", 1)
    if every == 1:
        return None
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(fields.layers)]


ADAPTERS: tuple[type[ModelAdapter], ...] = (LatentAttention, LatentPairs, SparseLatent)
