"""`CacheSettings`: the keys `cache.*`, read by the models' adapters, the planner and the engine alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from kvcore.errors import ConfigError
from kvcore.settings.key import MOST, check, key
from kvcore.settings.units import MOST_BYTES, parse_bytes

K = TypeVar("K", "DtypeByKind", "BlockSizeByKind")
DTYPES = ("auto", "float32", "bfloat16", "float16")
EXPLAIN_HISTORY = 65_536
CACHE_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2", "int8", "int4")


@dataclass(frozen=True)
class DtypeByKind:
    """Another precision for the groups of one kind; auto follows `cache.dtype`."""

    full: str = key("auto", "dtype of groups that keep every token", choices=CACHE_DTYPES)
    window: str = key("auto", "dtype of sliding-window groups", choices=CACHE_DTYPES)
    chunk: str = key("auto", "dtype of chunked-attention groups", choices=CACHE_DTYPES)
    latent: str = key("auto", "dtype of latent (MLA) groups", choices=CACHE_DTYPES)
    encoder: str = key("auto", "dtype of cross-attention groups", choices=CACHE_DTYPES)

    def __post_init__(self) -> None:
        check(self, "cache.dtype_by_kind")


@dataclass(frozen=True)
class BlockSizeByKind:
    """Another block size for the groups of one kind; null follows `cache.block_size`."""

    full: int | None = key(None, "tokens of a block of groups that keep every token", least=1)
    window: int | None = key(None, "tokens of a block of sliding-window groups", least=1)
    chunk: int | None = key(None, "tokens of a block of chunked-attention groups", least=1)
    latent: int | None = key(None, "tokens of a block of latent (MLA) groups", least=1)
    encoder: int | None = key(None, "tokens of a block of cross-attention groups", least=1)

    def __post_init__(self) -> None:
        check(self, "cache.block_size_by_kind")


@dataclass(frozen=True)
class CacheSettings:
    """The paged cache. Sizes may be given as text; once checked, `memory` is a whole number of bytes or None."""

    block_size: int | str = key(
        "auto", "tokens of a block; auto: smallest multiple of 16 that all backends take, more where pages are small"
    )
    block_size_by_kind: BlockSizeByKind = field(default_factory=BlockSizeByKind)
    dtype: str = key("auto", "element type; auto: as the checkpoint states, else the model's", choices=CACHE_DTYPES)
    dtype_by_kind: DtypeByKind = field(default_factory=DtypeByKind)
    scales: str | None = key(None, "granularity of scales of quantized types", choices=("tensor", "head", "token_head"))
    content: str = key("auto", "what a token stores; plugins bring more kinds")
    retention: str = key("auto", "how long tokens stay; plugins bring more kinds")
    placement: str = key("auto", "where pages lie; auto is what holds more", choices=("auto", "slots", "packed"))
    memory: int | str | None = key(None, "bytes of the arena, such as 2GiB; not with num_blocks", most=MOST_BYTES)
    num_blocks: int | None = key(None, "blocks of the arena, null block included", least=1)
    utilization: float = key(0.9, "share of the device's memory that the engine may use", least=0.01, most=1)
    mla: str = key("auto", "latent attention: as latents, or keys and values", choices=("auto", "latent", "expanded"))
    sanitize: bool = key(
        False, "check each step against a shadow of blocks and tables, poison content when it dies (NaN)"
    )
    prefix_caching: bool = key(True, "reuse the blocks of equal prompt beginnings")
    partial_reuse: str = key(
        "auto",
        "reuse also the beginning of a block, by copy; auto: where groups have unlike block sizes",
        choices=("auto", "true", "false"),
    )
    salt: str = key("", "isolates the prefixes of tenants")
    hash: str = key("sha256", "digest of prefix blocks", choices=("sha256", "xxh3-128"))
    eviction: str = key("lru", "which cached block goes first; plugins bring more policies")
    explain: bool = key(False, "keep what it takes to say why a prompt was not reused")
    explain_history: int = key(EXPLAIN_HISTORY, "forgotten blocks that explain remembers", least=1)

    events: bool = key(False, "tell plugins what becomes and ceases to be cached (hook kvcore_cache_events)")

    def __post_init__(self) -> None:
        # `true` arrives as the text "True".
        object.__setattr__(self, "partial_reuse", str(self.partial_reuse).lower())
        check(self, "cache")
        if isinstance(self.dtype_by_kind, Mapping):
            object.__setattr__(self, "dtype_by_kind", _of_kinds(DtypeByKind, "dtype_by_kind", self.dtype_by_kind))
        if isinstance(self.block_size_by_kind, Mapping):
            sizes = _of_kinds(BlockSizeByKind, "block_size_by_kind", self.block_size_by_kind)
            object.__setattr__(self, "block_size_by_kind", sizes)
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes("cache.memory", self.memory, least=1))
        if self.memory is not None and self.num_blocks is not None:
            raise ConfigError(
                "the size of the cache is given twice",
                field="cache.num_blocks",
                got=self.num_blocks,
                allowed="either cache.memory or cache.num_blocks",
            )
        if isinstance(self.block_size, str) and self.block_size != "auto":
            # ASCII alone, and not beyond what Python reads.
            written = self.block_size.isascii() and self.block_size.isdigit() and len(self.block_size) < 20
            object.__setattr__(self, "block_size", int(self.block_size) if written else 0)
        if self.block_size != "auto" and not 1 <= int(self.block_size) <= MOST:
            raise ConfigError(
                "cache.block_size is not a positive number of tokens",
                field="cache.block_size",
                got=self.block_size,
                allowed=f"auto, or a number from 1 to {MOST}",
            )

    def reuses_parts(self, block_sizes: Iterable[int]) -> bool:
        """Whether a hit may end inside a block, given the block sizes of all groups."""
        return len(set(block_sizes)) > 1 if self.partial_reuse == "auto" else self.partial_reuse == "true"

    @property
    def tokens_a_block(self) -> int | None:
        """`block_size`, or None for auto."""
        return None if self.block_size == "auto" else int(self.block_size)

    @property
    def tokens_a_block_by_kind(self) -> dict[str, int]:
        """The kinds of groups that have a block size of their own."""
        return {kind: size for kind, size in asdict(self.block_size_by_kind).items() if size is not None}

    @property
    def bytes_in_all(self) -> int | None:
        """`memory`, or None where nothing was said."""
        return None if self.memory is None else int(self.memory)

    def dtype_of(self, kind: str) -> str:
        """The element type asked for the groups of one kind, or ``auto``."""
        own: str = getattr(self.dtype_by_kind, kind, "auto")
        return self.dtype if own == "auto" else own


def _of_kinds(kinds: type[K], name: str, given: Mapping[str, Any]) -> K:
    known = [f.name for f in fields(kinds)]
    for kind in given:
        if kind not in known:
            raise ConfigError("there is no such kind", field=f"cache.{name}", got=kind, allowed=known)
    return kinds(**given)
