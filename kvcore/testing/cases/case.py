"""`Case`: one thing that a backend must do, as frozen data. Imports no torch.

Cases are written against a `Base`: the plainest problem that a backend takes. Block and head sizes, where
they are not what a case is about, follow the base, so that a backend whose blocks have at least 256 tokens
is asked the same questions as one whose blocks have 8, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from kvcore.attention.query import AttentionQuery, Mask
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import Content, KVHeads, Latent, Quant
from kvcore.spec.dtypes import ceil_div
from kvcore.spec.retention import Chunk, Full, Retention, Window
from kvcore.testing.cases.extents import BOUNDS, extent

# The axes by which cases can be chosen on the command line: `where.<axis>=<value>`.
AXES = (
    "profile",
    "content",
    "head_dim",
    "head_dim_v",
    "gqa",
    "block_size",
    "kernel_ratio",
    "dtype",
    "cache_dtype",
    "mask",
    "window",
    "sinks",
    "softcap",
    "alibi",
    "phase",
    "options",
    *BOUNDS,
)
LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5")
# How many cases run: a small set, those of tier quick, all.
SIZES = ("fast", "quick", "full")
TIERS = ("quick", "full")


class Base(NamedTuple):
    """The plainest problem that a backend takes; every case varies it.

    Attributes:
        dtype: Of queries and cache.
        head_dim: Of keys and values.
        block_size: Tokens of the smallest kernel block that is large enough to cut (at least 8).
        latent_dtype, latent_block_size: The same for latents, whose dimensions are those of the models.
        kernel_blocks: Per layout, block sizes that the declaration claims besides.
    """

    dtype: str = "float32"
    head_dim: int = 32
    block_size: int = 8
    latent_dtype: str = "bfloat16"
    latent_block_size: int = 64
    kernel_blocks: tuple[tuple[int, ...], ...] = ((17, 34, 544),)


class Seq(NamedTuple):
    """One sequence of a step.

    Attributes:
        computed: Tokens in the cache already.
        scheduled: Tokens of this step.
        shared: Leading tokens (whole blocks) that lie in the blocks of the sequence before it.
    """

    computed: int
    scheduled: int
    shared: int = 0

    @property
    def length(self) -> int:
        """Tokens after the step."""
        return self.computed + self.scheduled


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        id: ``<level>.<check>.<what varies>``; the same for every backend.
        level: L0 to L5.
        check: The check that judges it, from `kvcore.testing.checks.cell`.
        profile: The core profile that it belongs to, if any: ``kv``, ``latent`` or ``encoder``.
        stores: Kind of content: ``kv``, or ``latent`` with queries absorbed into the latent's space.
        stored_as: A plugin's content that stores the keys and values instead, or None.
        phase: Name of the shape of the step.
        seqs: The step; sequences with one token and a cached prefix come first.
        dtype, cache_dtype: Of queries, and of the cache ("" is the same).
        quant: Granularity of the cache's scales, for quantized `cache_dtype`.
        num_kv_heads, gqa: KV heads K, and query heads a KV head; H is their product.
        head_dim, head_dim_v: Dimensions; 0 for `head_dim_v` is the same. A latent has `head_dim` elements,
            of which the first `head_dim_v` (its rank) are the values.
        block_size, kernel_ratio: Tokens of a manager block, and kernel blocks in it.
        least_blocks: Blocks of the arena at least; those of the step then lie at both ends of it.
        causal, window, chunk, scale, softcap, alibi, sinks, lse: As in `AttentionQuery`.
        own_retention: The cache keeps only what the mask needs: tables hold the live tail.
        placement: ``slots`` or ``packed``.
        layout: Which of the layouts that the backend offers, in its order.
        layers: Layers of the group; each is written and read on its own.
        kin: What the layers of the group differ in, so that it holds several attention groups: "", a feature,
            or ``all``.
        neighbour: A second KV group in the same arena: "", ``window``, or a dtype.
        poison: What lies in slots that may not be read: ``nan``, ``inf`` or ``extreme``.
        data: Numbers that are not plain normal ones: "", ``large``, ``low``, ``even`` or ``flat``.
        k_scale, v_scale: Scales of quantized caches: the constant, or the size of the data.
        variant: What the check does besides.
        window_name: The window in words, such as ``P+1``.
        options: Options of the backend that are not those in use, by name.
        tier: ``quick`` cases run at both levels, ``full`` ones at level full alone.
        seed: Of the data and of the placement of blocks.
    """

    id: str
    level: str
    check: str
    profile: str = ""
    stores: str = "kv"
    stored_as: type[Content] | None = None
    phase: str = "none"
    seqs: tuple[Seq, ...] = ()
    dtype: str = "float32"
    cache_dtype: str = ""
    quant: str | None = None
    num_kv_heads: int = 2
    gqa: int = 2
    head_dim: int = 32
    head_dim_v: int = 0
    block_size: int = 8
    kernel_ratio: int = 1
    least_blocks: int = 0
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    own_retention: bool = False
    placement: str = "slots"
    layout: int = 0
    layers: int = 1
    kin: str = ""
    neighbour: str = ""
    poison: str = "nan"
    data: str = ""
    k_scale: float = 1.0
    v_scale: float = 1.0
    variant: str = ""
    window_name: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    tier: str = "quick"
    seed: int = 0

    @property
    def kind(self) -> str:
        """Kind of the content that a query names."""
        return self.stores if self.stored_as is None or self.stores == "latent" else self.stored_as.kind

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return self.num_kv_heads * self.gqa

    @property
    def dim_v(self) -> int:
        """Value dimension."""
        return self.head_dim_v or self.head_dim

    @property
    def stored_dtype(self) -> str:
        """Dtype of the cache."""
        return self.cache_dtype or self.dtype

    @property
    def kernel_block_size(self) -> int:
        """Tokens of a kernel block."""
        return self.block_size // self.kernel_ratio

    @property
    def tokens(self) -> int:
        """T, tokens of the step."""
        return sum(s.scheduled for s in self.seqs)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((s.length for s in self.seqs), default=0)

    @property
    def visible(self) -> int:
        """Most keys that a query of the step can see."""
        return min(n for n in (self.longest, self.window, self.chunk) if n is not None)

    @property
    def cost(self) -> int:
        """Tiles of 16 queries by 16 keys over all heads and layers: what an interpreter's time follows."""
        tiles = sum(ceil_div(s.scheduled, 16) * (1 + ceil_div(s.length, 16)) for s in self.seqs)
        return max(1, tiles * self.num_heads * self.layers * (2 if self.neighbour else 1))

    @property
    def options_name(self) -> str:
        """The options that it changes, in words."""
        return ",".join(f"{name}={value}" for name, value in self.options) or "given"

    def mask(self) -> Mask:
        """The mask."""
        return Mask(self.causal, self.window, self.chunk)

    def query(self) -> AttentionQuery:
        """What the backend is asked."""
        return AttentionQuery(
            content=self.kind,
            dtype=self.dtype,
            cache_dtype=self.stored_dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.dim_v,
            mask=self.mask(),
            scale=self.scale,
            softcap=self.softcap,
            alibi=self.alibi,
            sinks=self.sinks,
            quant=self.quant,
            lse=self.lse,
            graph_capture=self.check == "capture",
        )

    def each_layer(self) -> list[Case]:
        """What is asked of each layer of the first KV group."""
        p = self.block_size
        ways: dict[str, tuple[dict[str, object], ...]] = {
            "window": ({}, {"window": p + 1}, {"window": 2 * p}),
            "chunk": ({}, {"chunk": p + 3}),
            "scale": ({}, {"scale": 0.3}),
            "softcap": ({}, {"softcap": 1.5}),
            "sinks": ({}, {"sinks": True}),
            "alibi": ({}, {"alibi": True}),
            "all": ({}, {"window": p + 1, "sinks": True}, {"softcap": 1.5, "scale": 0.3}, {"alibi": True, "lse": True}),
        }
        mine = ways.get(self.kin, ({},))
        alone = replace(self, kin="", neighbour="")
        return [replace(alone, **mine[i % len(mine)]) for i in range(self.layers)]  # type: ignore[arg-type]

    def beside(self) -> Case:
        """The layer of the second KV group: another retention, or another precision."""
        if self.neighbour == "window":
            stored = "" if self.quant else self.cache_dtype
            return replace(
                self,
                window=self.block_size + 1,
                chunk=None,
                causal=True,
                own_retention=True,
                quant=None,
                cache_dtype=stored,
                neighbour="",
            )
        return replace(self, cache_dtype=self.neighbour, quant=None, neighbour="")

    def asked(self) -> list[Case]:
        """What is asked of a backend: each layer that differs, that of the second KV group last."""
        first = list(dict.fromkeys(self.each_layer())) if self.kin else [self]
        return [*first, self.beside()] if self.neighbour else first

    def content(self) -> Content:
        """What the cache stores."""
        if self.stores == "latent":
            return Latent(self.dim_v, self.head_dim - self.dim_v, self.stored_dtype)
        quant = None if self.quant is None else Quant(self.quant)  # type: ignore[arg-type]
        plain = KVHeads(self.num_kv_heads, self.head_dim, self.dim_v, self.stored_dtype, quant)
        own = None if self.stored_as is None else self.stored_as.instead_of(plain)
        return plain if own is None else own

    def cache_spec(self) -> KVCacheSpec:
        """Content and retention."""
        retention: Retention = Full()
        if self.own_retention and self.window is not None:
            retention = Window(self.window)
        elif self.own_retention and self.chunk is not None:
            retention = Chunk(self.chunk)
        return KVCacheSpec(self.content(), retention)

    def axes(self) -> dict[str, object]:
        """The value of every axis; empty for cases that run nothing."""
        if not self.seqs:
            return {}
        mask = [] if self.causal else ["bidirectional"]
        mask += [n for n in ("window", "chunk") if getattr(self, n) is not None]
        stored = self.stored_dtype + (f"/{self.quant}" if self.quant else "")
        mine: dict[str, object] = {"profile": self.profile} if self.profile else {}
        return mine | {
            "content": self.kind,
            "head_dim": self.head_dim,
            "head_dim_v": self.dim_v,
            "gqa": "all" if self.num_kv_heads == 1 else self.gqa,
            "block_size": self.block_size,
            "kernel_ratio": self.kernel_ratio,
            "dtype": self.dtype,
            "cache_dtype": stored,
            "mask": "+".join(mask) or "causal",
            "window": self.window_name or ("none" if self.window is None else self.window),
            "sinks": self.sinks,
            "softcap": "none" if self.softcap is None else self.softcap,
            "alibi": self.alibi,
            "phase": self.phase,
            "options": self.options_name,
            **{axis: extent(axis, self.sizes()[axis]) for axis in BOUNDS},
        }

    def sizes(self) -> dict[str, int]:
        """How large the case is, as far as that is a number."""
        return {
            "context": self.longest,
            "rows": max(s.scheduled for s in self.seqs),
            "tokens": self.tokens,
            "sequences": len(self.seqs),
            "blocks": ceil_div(self.longest, self.kernel_block_size),
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "gqa": self.gqa,
            "head_dim": self.head_dim,
        }

    def matches(self, where: dict[str, str]) -> bool:
        """Whether every named axis has the value asked for; a window is named by words or by its tokens."""
        mine = self.axes()
        if not mine:
            return not where
        for axis, wanted in where.items():
            names = {str(mine.get(axis, "none")).lower()}
            names |= {str(self.window)} if axis == "window" and self.window is not None else set()
            names |= {self.stored_dtype} if axis == "cache_dtype" else set()
            if wanted.lower() not in names:
                return False
        return True

    def storing(self, content: type[Content] | None) -> Case | None:
        """The case over a plugin's content, or None where that cannot stand in for what the case stores."""
        if content is None:
            return self
        plain = self.stores == "kv" and self.quant is None
        if not plain or any(content.instead_of(case.content()) is None for case in self.asked()):
            return None
        return replace(self, stored_as=content)

    def source(self, shown: Callable[[object], str] = repr) -> str:
        """The case as Python: the constructor call with everything that is not default.

        Args:
            shown: Turns a value into text.
        """
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("id", "level", "check") or value != f.default:
                seqs = f.name == "seqs"
                text = "(" + "".join(f"Seq{tuple(s)!r}, " for s in value) + ")" if seqs else shown(value)
                parts.append(f"    {f.name}={text},")
        return "Case(\n" + "\n".join(parts) + "\n)"
