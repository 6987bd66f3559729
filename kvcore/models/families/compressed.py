"""Compressed attention (DeepSeek-V4): a window of latents, and one entry for every run of older tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.attention.query import Mask
from kvcore.errors import ModelError, Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import ModelAdapter
from kvcore.models.families.base import FamilyAdapter
from kvcore.models.parts import CachePart, Indexer, LatentHeads, Recurrent
from kvcore.settings.cache import CacheSettings

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# Tokens of one entry, where `compress_rates` says nothing else; `compress_ratios` lists them by layer.
RATES = {WINDOW: 0, SPARSE: 4, HEAVY: 128}


class CompressedLatents(FamilyAdapter):
    """DeepSeek-V4: keys are values, one vector for all heads.

    Every layer keeps a window of them. Sparse layers keep one entry for 4 tokens and an indexer's key for each, heavily
    compressed ones one entry for 128. Tokens that do not fill an entry yet wait in a state, as in transformers'
    `DeepseekV4CSACache`: keys and gates, of two overlapping runs where the layer is sparse.
    """

    model_types = ("deepseek_v4", "deepseek_ref")
    remote = frozenset({"deepseek_ref"})
    layer_kinds = (WINDOW, SPARSE, HEAVY)

    def kinds(self, fields: Fields) -> list[str]:
        """The kind of each layer."""
        return fields.once("kinds", lambda: self.find_kinds(fields))

    def find_kinds(self, fields: Fields) -> list[str]:
        """Listed by name or by ratio; the ratios may count the layers that predict further tokens, at their end."""
        layers = fields.layers
        by_name = fields.per_layer("layer_types", self.layer_kinds, layers)
        ratios = fields.listing("compress_ratios")
        if ratios is None:  # two heavy layers, then heavy and sparse ones in turn, as in transformers' class
            return by_name or [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(layers)]
        padded = layers + fields.integer("num_nextn_predict_layers", 0, least=0)
        kind_of = {rate: kind for kind, rate in RATES.items()}
        if len(ratios) not in (layers, padded) or any(type(r) is not int or r not in kind_of for r in ratios):
            raise ModelError(
                "compress_ratios in config.json is not usable",
                field="compress_ratios",
                got=ratios,
                allowed=f"0, 4 or 128 for each of {layers} layers",
            )
        found = [kind_of[r] for r in ratios[:layers]]
        if by_name is not None and by_name != found:
            raise ModelError(
                "compress_ratios and layer_types of config.json disagree",
                field="compress_ratios",
                got=ratios,
                allowed="what layer_types says",
            )
        return found

    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """The window, and what the layer compresses."""
        kind = self.kinds(fields)[index]
        heads, dim = fields.heads, fields.integer("head_dim", 512)
        rope = fields.optional("qk_rope_head_dim") or dim // 8
        if rope >= dim:
            raise ModelError(
                "the rotary part of a key is no part of it", field="qk_rope_head_dim", got=rope, allowed=f"< {dim}"
            )
        mask = Mask(window=fields.integer("sliding_window"))
        yield LatentHeads(heads, dim - rope, rope, float(dim**-0.5), mask)
        if kind == WINDOW:
            return
        rate = Fields(fields.mapping("compress_rates"), nested=False).integer(kind, RATES[kind])
        yield LatentHeads(heads, dim - rope, rope, role="compressed", rate=rate)
        yield waiting(rate, dim, kind == SPARSE, "compressor")
        if kind == SPARSE:
            keys = fields.integer("index_head_dim", 128)
            yield Indexer(keys, rate)
            yield waiting(rate, keys, True, "index_compressor")

    def check_lists(self, fields: Fields) -> None:
        """Both lists are read where they are given."""
        self.kinds(fields)

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """Compressed entries are no cache of a backend."""
        yield Refusal("compress_ratios", "present", reason="its layers compress runs of tokens into entries")


def waiting(rate: int, dim: int, overlapping: bool, role: str) -> Recurrent:
    """Keys and gates of the run that is not full yet; of overlapping ones also half of the run before."""
    width = 2 * dim if overlapping else dim
    held = [(name, (rate, width), None) for name in ("keys", "gates")]
    before = [(f"{name}_before", (rate, dim), None) for name in ("keys", "gates")] if overlapping else []
    return Recurrent((*held, *before), role)


ADAPTERS: tuple[type[ModelAdapter], ...] = (CompressedLatents,)
