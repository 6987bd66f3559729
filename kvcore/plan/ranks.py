"""Ranks: how heads, layers and tokens are shared out, and what each rank then stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from kvcore.errors import ConfigError, KVCoreError
from kvcore.settings.key import check, key
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Latent
from kvcore.spec.retention import Full, Striped

MOST_RANKS = 1024


@dataclass(frozen=True)
class Ranks:
    """How many ranks share the work; tensor ranks times stages are all there are."""

    tensor: int = key(1, "ranks that share the heads of every layer", least=1, most=MOST_RANKS)
    pipeline: int = key(1, "stages that share the layers", least=1, most=MOST_RANKS)
    decode_context: int = key(1, "tensor ranks that share the tokens of a sequence", least=1, most=MOST_RANKS)

    def __post_init__(self) -> None:
        check(self, "parallel")

    @property
    def count(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each stage; the first ones take one more where they do not divide.

        Raises:
            ConfigError: There are more stages than layers.
        """
        if self.pipeline > num_layers:
            raise ConfigError(
                "there are more stages than layers",
                field="parallel.pipeline",
                got=self.pipeline,
                allowed=f"1 to {num_layers}",
            )
        least, more = divmod(num_layers, self.pipeline)
        bounds = [i * least + min(i, more) for i in range(self.pipeline + 1)]
        return tuple(range(a, b) for a, b in pairwise(bounds))

    def specs(self, caches: Mapping[CacheId, KVCacheSpec], query_heads: Iterable[int]) -> dict[CacheId, KVCacheSpec]:
        """What one rank stores of each cache.

        Query heads must divide. KV heads divide as well, or each of them lies on several ranks; latents and whatever
        else has no heads lies whole on every rank. Ranks that share tokens keep every so many-th token of the caches
        that keep all of them, each where the same heads or latents would lie more than once.

        Args:
            caches: What all ranks store together.
            query_heads: Query heads of every attention.

        Raises:
            ConfigError: Names the numbers of ranks that are allowed.
        """
        heads = tuple(query_heads)
        if not _tensor_fits(self.tensor, caches.values(), heads):
            most = max(
                (*heads, *(s.content.num_kv_heads for s in caches.values() if isinstance(s.content, KVHeads)), 1)
            )
            raise ConfigError(
                "the heads of this model cannot be shared out to so many ranks: query heads must divide, KV heads must "
                "divide or be a divisor",
                field="parallel.tensor",
                got=self.tensor,
                allowed=[n for n in range(1, most + 1) if _tensor_fits(n, caches.values(), heads)],
            )
        contexts = [n for n in range(1, self.tensor + 1) if self._context_fits(n, caches.values())]
        if self.decode_context not in contexts:
            raise ConfigError(
                "ranks share the tokens of what would lie on each of them: tensor ranks over KV heads, or all of "
                "them for latents",
                field="parallel.decode_context",
                got=self.decode_context,
                allowed=contexts,
                remedy=f"raise parallel.tensor, now {self.tensor}, to a multiple of the KV heads",
            )
        return {cache: self._on_rank(spec) for cache, spec in caches.items()}

    def _on_rank(self, spec: KVCacheSpec) -> KVCacheSpec:
        striped = self.decode_context > 1 and isinstance(spec.retention, Full)
        return KVCacheSpec(
            spec.content.on_rank(self.tensor), Striped(self.decode_context) if striped else spec.retention
        )

    def _context_fits(self, ranks: int, specs: Iterable[KVCacheSpec]) -> bool:
        return all(_copies(s, self.tensor) % ranks == 0 for s in specs if isinstance(s.retention, Full))


def _copies(spec: KVCacheSpec, tensor: int) -> int:
    """How many tensor ranks hold the same bytes."""
    if isinstance(spec.content, KVHeads):
        return max(1, tensor // spec.content.num_kv_heads)
    return tensor if isinstance(spec.content, Latent) else 1


def _tensor_fits(ranks: int, specs: Iterable[KVCacheSpec], query_heads: tuple[int, ...]) -> bool:
    try:
        for content in {s.content for s in specs}:
            content.on_rank(ranks)
    except KVCoreError:
        return False
    return not any(h % ranks for h in query_heads)
