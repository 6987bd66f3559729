"""Contents: what one token, or one request, stores in one layer.

A content names its fields and their logical axes; how those lie in memory is the layout's business.
The family is open: a plugin adds a class through the hook `kvcore_contents`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from kvcore.errors import NotBuiltError, SpecError
from kvcore.spec.dtypes import ceil_div, dtype, nbytes, positive


def shared_out(name: str, count: int, ranks: int) -> int:
    """Heads on one rank: they divide, or each lies on several ranks.

    Raises:
        SpecError: Neither.
    """
    if count % ranks and ranks % count:
        raise SpecError(
            f"{name} can be shared out to a divisor or to a multiple of their number alone",
            field="parallel.tensor",
            got=ranks,
            allowed=f"a divisor or a multiple of {count}",
        )
    return max(1, count // ranks)


Granularity = Literal["tensor", "head", "token_head"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)


@dataclass(frozen=True)
class LogicalField:
    """One named part of a page, before any layout.

    Attributes:
        name: ``k``, ``v``, ``k_scale``, ``latent``, ``conv_state``, ...
        axes: (axis name, size) of one token (or one request); the token axis is not among them.
        dtype: Name of the element type.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Elements of one token (or one request)."""
        count = 1
        for _, size in self.axes:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of one token (or one request)."""
        return nbytes(self.dtype, self.elements)


class Content(ABC):
    """What a cache stores per token, or per request where `per_request` is true.

    Attributes:
        kind: Its name, by which queries and `cache.content=` ask for it.
        per_request: Whether it is kept per request.
        read_as_written: Whether its fields ``k`` and ``v`` hold keys and values as they are given, rounded to the
            dtype of the field. What stores them in another way brings `encode` and `decode` instead.
        loss: Largest error of decode(encode(x)) beyond the rounding of the fields' dtypes, as a share of the largest
            number of a token and head: 1/14 for codes of 4 bits.
    """

    kind: ClassVar[str]
    per_request: ClassVar[bool] = False
    read_as_written: ClassVar[bool] = False
    loss: ClassVar[float] = 0.0

    @classmethod
    def instead_of(cls, content: Content) -> Content | None:
        """What this class stores instead of `content` where `cache.content=<kind>` asks for it, or None.

        A content of a plugin becomes usable by this method: a model's caches are described in the core's own
        contents first.
        """
        return None

    @abstractmethod
    def fields(self) -> tuple[LogicalField, ...]:
        """The fields in their canonical order."""

    def on_rank(self, ranks: int) -> Content:
        """What one of `ranks` tensor ranks stores; all of it where nothing can be shared out.

        Raises:
            SpecError: It cannot be shared out to so many.
        """
        return self

    def encode(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the fields hold for some tokens: what `kvcore conform cache.content=<kind>` holds a backend to.

        Plain and slow is right here; no backend has to call it.

        Args:
            values: ``k`` [n, K, D] and ``v`` [n, K, Dv], torch float64.

        Returns:
            Every field, torch [n, *axes] in the field's dtype.

        Raises:
            NotBuiltError: The content does not bring it.
        """
        raise self._lacks("encode")

    def decode(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys and values that stored fields stand for: the way back from `encode`.

        Args:
            fields: Every field, torch [n, *axes] in the field's dtype.

        Returns:
            ``k`` [n, K, D] and ``v`` [n, K, Dv], torch float64.

        Raises:
            NotBuiltError: The content does not bring it.
        """
        raise self._lacks("decode")

    def _lacks(self, method: str) -> NotBuiltError:
        return NotBuiltError(
            f"content {self.kind} does not say how it is {method}d",
            field="cache.content",
            got=self.kind,
            allowed="a content with `encode` and `decode`, or with `read_as_written = True`",
            remedy=f"give {type(self).__name__} a method `{method}`",
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds; 0 for contents kept per request."""
        return 0 if self.per_request else sum(f.nbytes for f in self.fields())

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one request's state; 0 for contents kept per token."""
        return sum(f.nbytes for f in self.fields()) if self.per_request else 0


@dataclass(frozen=True)
class Quant:
    """How quantized values find their scale.

    Attributes:
        granularity: ``tensor`` and ``head`` scales are constants of the layer;
            ``token_head`` scales are float32 fields of the page.
    """

    granularity: Granularity = "tensor"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise SpecError(
                "unknown scale granularity", field="cache.scales", got=self.granularity, allowed=GRANULARITIES
            )


@dataclass(frozen=True)
class KVHeads(Content):
    """Keys and values of `num_kv_heads` heads.

    Attributes:
        num_kv_heads: KV heads K.
        head_dim: Key dimension D.
        head_dim_v: Value dimension; `head_dim` when None is given.
        dtype: Element type of both fields.
        quant: Required exactly when `dtype` is a quantized type.
    """

    kind: ClassVar[str] = "kv"

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "float16"
    quant: Quant | None = None

    def __post_init__(self) -> None:
        positive("num_kv_heads", self.num_kv_heads)
        positive("head_dim", self.head_dim)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        positive("head_dim_v", self.head_dim_v)
        if dtype(self.dtype).quantized != (self.quant is not None):
            raise SpecError(
                "a quantized dtype and a scale granularity go together",
                field="cache.dtype",
                got=f"{self.dtype} with quant={self.quant}",
                allowed="quantized dtype with Quant(...), or a plain dtype without",
            )

    def on_rank(self, ranks: int) -> KVHeads:
        """Its share of the heads, at least one."""
        return replace(self, num_kv_heads=shared_out("KV heads", self.num_kv_heads, ranks))

    @property
    def v_dim(self) -> int:
        """Value dimension as an int."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def fields(self) -> tuple[LogicalField, ...]:
        """``k``, ``v`` and, for token-and-head scales, ``k_scale``, ``v_scale``."""
        heads = ("head", self.num_kv_heads)
        fields = [
            LogicalField("k", (heads, ("dim", self.head_dim)), self.dtype),
            LogicalField("v", (heads, ("dim", self.v_dim)), self.dtype),
        ]
        if self.quant is not None and self.quant.granularity == "token_head":
            fields += [LogicalField(n, (heads,), "float32") for n in ("k_scale", "v_scale")]
        return tuple(fields)


@dataclass(frozen=True)
class Latent(Content):
    """One compressed vector a token (multi-head latent attention): `rank` plus `rope_dim` elements.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1): the latent is shared by all heads.
    """

    kind: ClassVar[str] = "latent"

    rank: int
    rope_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        positive("rank", self.rank)
        if self.rope_dim < 0:
            raise SpecError("rope_dim is negative", field="rope_dim", got=self.rope_dim, allowed=">= 0")
        dtype(self.dtype)

    def fields(self) -> tuple[LogicalField, ...]:
        """The single field ``latent``."""
        return (LogicalField("latent", (("dim", self.rank + self.rope_dim),), self.dtype),)


@dataclass(frozen=True)
class IndexKeys(Content):
    """The key by which a sparse indexer scores a token: `dim` elements in fp8, and a float32 scale for each 128.

    As engines store it whatever the dtype of the cache (vLLM's `DeepseekV32IndexerCache`, FlashMLA): 132 bytes at the
    128 elements of DeepSeek-V3.2.
    """

    kind: ClassVar[str] = "index_keys"

    dim: int

    def __post_init__(self) -> None:
        positive("index_head_dim", self.dim)

    def fields(self) -> tuple[LogicalField, ...]:
        """``k`` and ``k_scale``."""
        scales = LogicalField("k_scale", (("part", ceil_div(self.dim, 128)),), "float32")
        return (LogicalField("k", (("dim", self.dim),), "fp8_e4m3"), scales)


@dataclass(frozen=True)
class State(Content):
    """Recurrent state of one request: any number of tensors that do not grow with its length.

    Attributes:
        names, shapes, dtypes: Of each tensor.
        heads: Of each tensor, what its first axis is made of: (heads, width of one) pairs that tensor ranks share
            out; none for a tensor that lies whole on every rank.
    """

    kind: ClassVar[str] = "state"
    per_request: ClassVar[bool] = True

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    heads: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __post_init__(self) -> None:
        lengths: Sequence[int] = (len(self.names), len(self.shapes), len(self.dtypes))
        if len(set(lengths)) != 1 or not self.names:
            raise SpecError(
                "a state needs one name, shape and dtype for each tensor",
                field="State",
                got=lengths,
                allowed="equal lengths of at least 1",
            )
        if len(set(self.names)) != len(self.names):
            raise SpecError("the tensors of a state need distinct names", field="State", got=self.names)
        for shape in self.shapes:
            for size in shape:
                positive("shape", size)
        for f in self.fields():
            positive("bytes", f.nbytes)
        for shape, pairs in zip(self.shapes, self.heads, strict=bool(self.heads)):
            if pairs and sum(count * width for count, width in pairs) != shape[0]:
                raise SpecError("the heads of a state do not make up its axis", field="State", got=pairs, allowed=shape)

    def on_rank(self, ranks: int) -> State:
        """Its share of every tensor that is made of heads."""
        pairs = self.heads or ((),) * len(self.shapes)
        kept = tuple(
            tuple((shared_out("heads of the state", count, ranks), width) for count, width in each) for each in pairs
        )
        shapes = tuple(
            (sum(count * width for count, width in each), *shape[1:]) if each else shape
            for shape, each in zip(self.shapes, kept, strict=True)
        )
        return replace(self, shapes=shapes, heads=kept if self.heads else ())

    def fields(self) -> tuple[LogicalField, ...]:
        """One field a tensor; its axes are called ``s0``, ``s1``, ..."""
        return tuple(
            LogicalField(name, tuple((f"s{i}", size) for i, size in enumerate(shape)), element)
            for name, shape, element in zip(self.names, self.shapes, self.dtypes, strict=True)
        )
