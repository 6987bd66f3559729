"""Page layouts: in which order, and how aligned, the fields of a page lie in memory.

A backend declares a `PageLayout`; the core alone turns it into offsets and strides (`SizedLayout`),
so that nobody recomputes a stride from a shape.

    NHD        k: (token, head, dim)            v: (token, head, dim)
    HND        k: (head, token, dim)            v: (head, token, dim)
    x-packed   k: (head, dim/x, token, x)       v: (head, dim, token)

    block-first    | k0 v0 | k1 v1 | k2 v2 | ...      a kernel page holds its fields together
    field-first    | k0 k1 k2 ...  | v0 v1 v2 ...     each field is its own run of N blocks
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvcore.errors import LayoutError
from kvcore.spec.content import Content
from kvcore.spec.dtypes import dtype, nbytes, positive, round_up

TOKEN = "token"
# The two usual orders of a field of heads, with and without elements (scales have none).
KV_ORDERS = {
    ("token", "head", "dim"): "nhd",
    ("token", "head"): "nhd",
    ("head", "token", "dim"): "hnd",
    ("head", "token"): "hnd",
}
Order = Literal["block_first", "field_first"]


class Axis(NamedTuple):
    """One axis of a field, in memory order.

    An axis that is split, such as x-packed keys, appears twice under one name, outer part first.
    `size` None stands for the tokens of a kernel block that the other `token` axes leave over.
    """

    name: str
    size: int | None


@dataclass(frozen=True)
class LayoutField:
    """One field with its axes in memory order, outermost first."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes in memory order."""
        return tuple(axis.name for axis in self.axes)


@dataclass(frozen=True)
class PageLayout:
    """How a backend wants the fields of a page to lie, for any kernel block size.

    Attributes:
        name: Short name shown to people, such as ``hnd`` or ``kv_first``.
        fields: Fields in memory order.
        order: ``block_first`` or ``field_first``.
        alignment: Bytes to which every page and every field is aligned; a power of two, at most 256.
    """

    name: str
    fields: tuple[LayoutField, ...]
    order: Order = "block_first"
    alignment: int = 16

    def __post_init__(self) -> None:
        a = self.alignment
        if a < 1 or a > 256 or a & (a - 1):
            raise LayoutError(
                "alignment must be a power of two that the arena keeps",
                field="alignment",
                got=a,
                allowed="1, 2, 4, ..., 256",
            )
        names = [f.name for f in self.fields]
        if not names or len(set(names)) != len(names):
            raise LayoutError("fields need distinct names", field="fields", got=names)
        for f in self.fields:
            if dtype(f.dtype).bits > 8 * a:
                raise LayoutError(
                    f"layout {self.name}: alignment is below an element of field {f.name}",
                    field="alignment",
                    got=a,
                    allowed=f">= {dtype(f.dtype).bits // 8}",
                )
            for axis in f.axes:
                if axis.size is not None:
                    positive("axis", axis.size)
                elif axis.name != TOKEN:
                    raise LayoutError(
                        f"layout {self.name}: only the token axis may be open", field=f.name, got=axis.name
                    )

    def at(self, kernel_block_size: int) -> SizedLayout:
        """This layout for kernel blocks of `kernel_block_size` tokens."""
        return SizedLayout(self, positive("kernel_block_size", kernel_block_size))

    def kv_order(self, *allowed: str) -> str:
        """``nhd`` where all fields are (token, head[, dim]), ``hnd`` where they are (head, token[, dim]).

        Raises:
            LayoutError: The fields are neither, or not one of `allowed`.
        """
        orders = {KV_ORDERS.get(f.axis_names, "") for f in self.fields}
        order = orders.pop() if len(orders) == 1 else ""
        if order not in allowed:
            raise LayoutError(
                f"the backend cannot read layout {self.name}",
                field="layout",
                got={f.name: f.axis_names for f in self.fields},
                allowed=allowed,
            )
        return order

    def check(self, content: Content) -> None:
        """Raise `LayoutError` unless the fields hold exactly what `content` stores."""
        want = {f.name: f for f in content.fields()}
        if set(want) != {f.name for f in self.fields}:
            raise LayoutError(
                f"layout {self.name} does not hold the fields of the content",
                field="fields",
                got=[f.name for f in self.fields],
                allowed=list(want),
            )
        for mine in self.fields:
            logical = want[mine.name]
            sizes: dict[str, int] = {}
            for axis in mine.axes:
                if axis.name != TOKEN:
                    sizes[axis.name] = sizes.get(axis.name, 1) * positive("axis", axis.size)
            free = [a for a in mine.axes if a.size is None]
            tokens = 0 if content.per_request else 1
            if (
                sizes != dict(logical.axes)
                or mine.dtype != logical.dtype
                or len(free) != tokens
                or any(a.name != TOKEN for a in free)
                or (content.per_request and any(a.name == TOKEN for a in mine.axes))
            ):
                raise LayoutError(
                    f"layout {self.name}: field {mine.name} does not match the content",
                    field=mine.name,
                    got=f"{[tuple(a) for a in mine.axes]} {mine.dtype}",
                    allowed=f"{dict(logical.axes)} and one open token axis, {logical.dtype}",
                )


class FieldPlace(NamedTuple):
    """Where one field lies inside a kernel page (block-first) or a piece (field-first).

    Attributes:
        name: Field name.
        offset: Bytes from the start of the kernel page; 0 for field-first, whose pieces are apart.
        shape: Sizes of the axes in memory order; the last is in bytes for packed types.
        strides: Bytes from one index to the next, for each axis.
        nbytes: Bytes of the field without padding.
        dtype: Name of the element type.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class SizedLayout:
    """A `PageLayout` at one kernel block size: every offset and stride is known."""

    layout: PageLayout
    kernel_block_size: int
    places: tuple[FieldPlace, ...] = field(init=False)

    def __post_init__(self) -> None:
        places, offset = [], 0
        for f in self.layout.fields:
            sizes = [self._axis_size(f, axis) for axis in f.axes]
            if dtype(f.dtype).bits < 8:  # packed: the last axis is counted in bytes
                sizes[-1] = nbytes(f.dtype, sizes[-1])
            strides, size = [0] * len(sizes), max(1, dtype(f.dtype).bits // 8)
            for i in range(len(sizes) - 1, -1, -1):
                strides[i] = size
                size *= sizes[i]
            if self.layout.order == "field_first":
                offset = 0
            places.append(FieldPlace(f.name, offset, tuple(sizes), tuple(strides), size, f.dtype))
            offset = round_up(offset + size, self.layout.alignment)
        object.__setattr__(self, "places", tuple(places))
        if self.layout.order == "field_first" and len({p.nbytes for p in places}) > 1:
            raise LayoutError(
                f"layout {self.layout.name}: field-first needs fields of equal bytes",
                field="layout",
                got={p.name: p.nbytes for p in places},
                remedy="use a block-first layout for this content",
            )

    def _axis_size(self, f: LayoutField, axis: Axis) -> int:
        if axis.size is not None:
            return axis.size
        fixed = 1
        for other in f.axes:
            if other.name == TOKEN and other.size is not None:
                fixed *= other.size
        if self.kernel_block_size % fixed:
            raise LayoutError(
                f"layout {self.layout.name}: field {f.name} packs {fixed} tokens",
                field="kernel_block_size",
                got=self.kernel_block_size,
                allowed=f"multiples of {fixed}",
            )
        return self.kernel_block_size // fixed

    @property
    def field_first(self) -> bool:
        """Whether each field is its own run of blocks."""
        return self.layout.order == "field_first"

    @property
    def piece_bytes(self) -> int:
        """Field-first: bytes of one field of a kernel block, padding included."""
        return round_up(self.places[0].nbytes, self.layout.alignment)

    @property
    def kernel_page_bytes(self) -> int:
        """Bytes of one kernel block in one layer, padding included."""
        if self.field_first:
            return self.piece_bytes * len(self.places)
        last = self.places[-1]
        return round_up(last.offset + last.nbytes, self.layout.alignment)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one kernel block in one layer without any padding."""
        return sum(p.nbytes for p in self.places)

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean that either side can read what the other wrote (hex, 16 digits)."""
        facts = {
            "order": self.layout.order,
            "kernel_block_size": self.kernel_block_size,
            "fields": [
                [p.name, [tuple(a) for a in f.axes], p.dtype, p.offset, p.strides]
                for p, f in zip(self.places, self.layout.fields, strict=True)
            ],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class KernelBlocks:
    """Which kernel block sizes a kernel takes: a list, or every multiple of n.

    Args:
        sizes: The sizes, or empty.
        multiple_of: n, or None.
    """

    sizes: tuple[int, ...] = ()
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        if bool(self.sizes) == (self.multiple_of is not None):
            raise LayoutError("give kernel block sizes, or a number they are multiples of", field="kernel_block_sizes")
        for size in self.sizes or (self.multiple_of,):
            positive("kernel_block_size", size)

    def fit(self, block_size: int) -> int | None:
        """The largest allowed kernel block size that divides `block_size`, or None."""
        if self.multiple_of is not None:
            return block_size if block_size % self.multiple_of == 0 else None
        return max((s for s in self.sizes if block_size % s == 0), default=None)

    def __str__(self) -> str:
        return f"multiples of {self.multiple_of}" if self.multiple_of else " or ".join(map(str, self.sizes))


@dataclass(frozen=True)
class LayoutOption:
    """One layout that a backend can work on, with the kernel block sizes it takes there."""

    layout: PageLayout
    kernel_blocks: KernelBlocks


def nhd(content: Content, *, name: str = "nhd", order: Order = "block_first", alignment: int = 16) -> PageLayout:
    """Every field as (token, *logical axes): keys are (token, head, dim)."""
    return _uniform(content, name, order, alignment, token_at=0)


def hnd(content: Content, *, name: str = "hnd", order: Order = "block_first", alignment: int = 16) -> PageLayout:
    """Every field with the token axis after the first logical axis: keys are (head, token, dim)."""
    return _uniform(content, name, order, alignment, token_at=1)


def plain_layout(content: Content) -> PageLayout:
    """The core's own layout, where no backend offers one: canonical order, block-first."""
    if content.per_request:
        fields = tuple(LayoutField(f.name, tuple(Axis(*a) for a in f.axes), f.dtype) for f in content.fields())
        return PageLayout("plain", fields)
    return nhd(content, name="plain")


def _uniform(content: Content, name: str, order: Order, alignment: int, token_at: int) -> PageLayout:
    fields = []
    for f in content.fields():
        axes = [Axis(*a) for a in f.axes]
        axes.insert(min(token_at, len(axes)), Axis(TOKEN, None))
        fields.append(LayoutField(f.name, tuple(axes), f.dtype))
    return PageLayout(name, tuple(fields), order, alignment)
