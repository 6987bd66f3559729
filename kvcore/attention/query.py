"""`AttentionQuery`: every fact of a layer that can change its answer, asked before any kernel runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum

from kvcore.errors import Refusal, SpecError, natural
from kvcore.spec.content import GRANULARITIES
from kvcore.spec.dtypes import DTYPES


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. Query i and key j are positions in the same sequence.

    Attributes:
        causal: j <= i; False is bidirectional.
        window: ``i - window < j``, and for bidirectional masks also ``j < i + window``.
        chunk: ``j // chunk == i // chunk``.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"mask {name} must be positive", field=name, got=value, allowed=">= 1")

    @property
    def keys_before(self) -> int | None:
        """Keys before its own that a query may see, None for all: a window counts the query itself."""
        return None if self.window is None else self.window - 1

    @property
    def keys_after(self) -> int | None:
        """Keys after its own that a query may see, None for all."""
        return 0 if self.causal else self.keys_before

    def within(self, longest: int) -> Mask:
        """The same mask for sequences of at most `longest` tokens: no window or chunk that hides none of them."""
        window = None if self.window is not None and self.window >= longest else self.window
        chunk = None if self.chunk is not None and self.chunk >= longest else self.chunk
        return self if (window, chunk) == (self.window, self.chunk) else Mask(self.causal, window, chunk)


class Feature(StrEnum):
    """Every optional feature that a query can ask for; `Capabilities.features` names those that are honoured."""

    BIDIRECTIONAL = "bidirectional"  # Queries see later keys too.
    WINDOW = "window"  # Keys further back than a window are hidden.
    CHUNK = "chunk"  # Keys of other chunks are hidden.
    SCALE = "scale"  # A softmax scale other than head_dim ** -0.5.
    SOFTCAP = "softcap"  # Scores pass through cap * tanh(score / cap).
    ALIBI = "alibi"  # Slopes of the layer lower scores by distance.
    SINKS = "sinks"  # One extra logit a head in the denominator.
    QUANT = "quant"  # The cache holds codes and scales.
    LSE = "lse"  # The log-sum-exp is wanted.
    GRAPH_CAPTURE = "graph_capture"  # The step must be capturable.
    UNLIKE_DIMS = "unlike_dims"  # Values have another dimension than keys.


@dataclass(frozen=True)
class AttentionQuery:
    """The facts of one layer. Storage (retention, block size, layout) is no part of it.

    Attributes:
        content: Kind of content: ``kv`` or ``latent``.
        dtype: Element type of queries and outputs.
        cache_dtype: Element type of the cached fields.
        num_heads: Query heads H.
        num_kv_heads: KV heads K; H is a multiple of K.
        head_dim: Dimension of queries and keys.
        head_dim_v: Dimension of values and outputs.
        mask: Which keys a query sees.
        scale: Softmax scale; None stands for ``head_dim ** -0.5``.
        softcap: ``cap * tanh(score / cap)`` after the scale; None for none.
        alibi: Whether slopes are added: ``-slope * |i - j|``, after the soft-cap.
        sinks: Whether one extra logit a head takes part in the softmax's denominator.
        quant: Granularity of the cache's scales, or None for an unquantized cache.
        lse: Whether the log-sum-exp is wanted.
        graph_capture: Whether the step must be capturable.
    """

    content: str
    dtype: str
    cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask = field(default_factory=Mask)
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    quant: str | None = None
    lse: bool = False
    graph_capture: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be positive", field=name, got=getattr(self, name), allowed=">= 1")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                "query heads must be a multiple of KV heads",
                field="num_heads",
                got=self.num_heads,
                allowed=f"multiples of {self.num_kv_heads}",
            )

    @property
    def softmax_scale(self) -> float:
        """The scale as a number."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def group_size(self) -> int:
        """Query heads a KV head (grouped-query attention)."""
        return self.num_heads // self.num_kv_heads

    def features(self) -> dict[str, object]:
        """The optional features in use, by name, with their value.

        Every field with a default counts, so that a feature added later is refused by each backend
        that does not know its name.
        """
        used: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "mask":
                used |= {} if value.causal else {"bidirectional": True}
                used |= {n: getattr(value, n) for n in ("window", "chunk") if getattr(value, n) is not None}
            elif f.name in _OPTIONAL and value not in (None, False):
                used[f.name] = value
        if self.head_dim != self.head_dim_v:
            used["unlike_dims"] = (self.head_dim, self.head_dim_v)
        return used


_REQUIRED = ("content", "dtype", "cache_dtype", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "mask")
_OPTIONAL = frozenset(f.name for f in fields(AttentionQuery) if f.name not in _REQUIRED)


@dataclass(frozen=True)
class Capabilities:
    """A table of what a backend serves; whatever the table does not name is refused.

    Attributes:
        contents: Kinds of content.
        dtypes: Query dtypes.
        cache_dtypes: Cache dtypes; empty means the query's own dtype only.
        features: Names of `Feature` that are honoured; another name is refused at declaration.
        head_dims: Allowed key dimensions, or None for any.
        group_sizes: Allowed query heads a KV head, or None for any.
        granularities: Allowed scale granularities, for `quant`.
    """

    contents: Collection[str] = ("kv",)
    dtypes: Collection[str] = ()
    cache_dtypes: Collection[str] = ()
    features: Collection[str] = ()
    head_dims: Collection[int] | None = None
    group_sizes: Collection[int] | None = None
    granularities: Collection[str] = ()

    def __post_init__(self) -> None:
        """A word that no query ever says would serve nothing: it is a slip, and is refused where it is written."""
        known: dict[str, Collection[str]] = {
            "dtypes": DTYPES,
            "cache_dtypes": DTYPES,
            "features": [f.value for f in Feature],
            "granularities": GRANULARITIES,
        }
        for name, allowed in known.items():
            given = getattr(self, name)
            unknown = [given] if isinstance(given, str) else [x for x in given if x not in allowed]
            if unknown:
                raise SpecError(
                    f"Capabilities.{name} names what no query asks for",
                    field=name,
                    got=unknown[0],
                    allowed=sorted(allowed),
                    remedy="give a tuple of the allowed names",
                )

    def check(self, query: AttentionQuery) -> Refusal | None:
        """The first fact of `query` outside the table, or None when all are inside."""
        for name, got, allowed in self._facts(query):
            if allowed is not None and got not in allowed:
                return Refusal(name, got, sorted(allowed, key=natural) or "none")
        return None

    def _facts(self, q: AttentionQuery) -> Iterable[tuple[str, object, Collection[object] | None]]:
        yield "content", q.content, self.contents
        yield "dtype", q.dtype, self.dtypes
        yield "cache_dtype", q.cache_dtype, self.cache_dtypes or (q.dtype,)
        yield "head_dim", q.head_dim, self.head_dims
        yield "head_dim_v", q.head_dim_v, self.head_dims
        yield "group_size", q.group_size, self.group_sizes
        for name, value in q.features().items():
            if name not in self.features:
                # `got` is the value, `allowed` says that the feature itself is absent.
                yield name, value, ()
            elif name == "quant":
                yield "quant", value, self.granularities
