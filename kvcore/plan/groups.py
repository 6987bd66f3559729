"""Which caches can share a block table, and which layout and block size each of them gets.

Layouts, kernel block sizes and the block size are chosen jointly: under `slots` the caches of unlike
groups lie over one another, so their layouts must cover the same bytes for the same block id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcore.errors import LayoutError
from kvcore.plan.config import Placement
from kvcore.spec.cache_spec import CacheId, KVCacheSpec, shown
from kvcore.spec.layout import KernelBlocks, LayoutOption, SizedLayout, plain_layout

BLOCK_STEP = 16
LARGEST_AUTO_BLOCK = 4096


@dataclass(frozen=True)
class LayoutOffer:
    """What the chosen backend offers for a cache.

    Attributes:
        backend: Name of the backend, or None when none serves this content.
        options: Its layouts in order of preference; empty stands for the core's plain layout.
        max_offset_bits: 31 or 63, the element offsets its kernels can compute.
    """

    backend: str | None = None
    options: tuple[LayoutOption, ...] = ()
    max_offset_bits: int = 63


@dataclass(frozen=True)
class CacheClass:
    """Caches of equal spec and backend: they can share a block table."""

    spec: KVCacheSpec
    offer: LayoutOffer
    cache_ids: tuple[CacheId, ...]

    @property
    def options(self) -> tuple[LayoutOption, ...]:
        """The backend's layouts, or the core's plain one."""
        plain = LayoutOption(plain_layout(self.spec.content), KernelBlocks(multiple_of=1))
        return self.offer.options or (plain,)

    def __str__(self) -> str:
        return f"{self.spec.kind} {shown(self.cache_ids)}"


@dataclass(frozen=True)
class ChosenClass:
    """A class with its layout and block size settled."""

    members: CacheClass
    layout: SizedLayout
    block_size: int

    @property
    def ratio(self) -> int:
        """Kernel blocks in a block."""
        return self.block_size // self.layout.kernel_block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.layout.kernel_page_bytes * self.ratio

    @property
    def stride_unit(self) -> int:
        """Block strides are multiples of this: r times the alignment, for each field-first run."""
        runs = len(self.layout.places) if self.layout.field_first else 1
        return self.layout.layout.alignment * self.ratio * runs


def classes(caches: Mapping[CacheId, KVCacheSpec], offers: Mapping[CacheId, LayoutOffer]) -> tuple[CacheClass, ...]:
    """Caches of equal spec and offer, in the order of their first layer."""
    found: dict[tuple[KVCacheSpec, LayoutOffer], list[CacheId]] = {}
    for cache, spec in caches.items():
        offer = offers.get(cache, LayoutOffer())
        if (spec, offer) not in found:
            for option in offer.options:
                option.layout.check(spec.content)
        found.setdefault((spec, offer), []).append(cache)
    return tuple(CacheClass(spec, offer, tuple(ids)) for (spec, offer), ids in found.items())


def choose(
    members: Sequence[CacheClass],
    block_size: int | None,
    placement: Placement,
    by_kind: Mapping[str, int] | None = None,
) -> tuple[ChosenClass, ...]:
    """Settle layouts, kernel block sizes and block sizes of all classes.

    Args:
        members: The classes.
        block_size: As asked. None takes under `packed` the smallest multiple of 16 that a class takes, each for
            itself; under `slots` the smallest that every class takes, and multiples of it for classes of small
            pages: a block costs every class the bytes of the largest page.
        placement: ``slots`` or ``packed``; packed takes block-first layouts only.
        by_kind: Block sizes asked for the classes of one kind; they go before `block_size`.

    Raises:
        LayoutError: No combination exists; names the layouts or the block size at fault.
    """
    by_kind = by_kind or {}
    if placement == "packed":
        return tuple(one for c in members for one in _choose([c], block_size, placement, by_kind))
    found = _choose(members, block_size, placement, by_kind)
    return found if block_size else _with_like_pages(found, placement, by_kind)


def _choose(
    members: Sequence[CacheClass], block_size: int | None, placement: Placement, by_kind: Mapping[str, int]
) -> tuple[ChosenClass, ...]:
    free = not block_size and any(c.spec.kind not in by_kind for c in members)
    sizes = range(BLOCK_STEP, LARGEST_AUTO_BLOCK + 1, BLOCK_STEP) if free else [block_size or BLOCK_STEP]
    refusal: LayoutError | None = None
    for size in sizes:
        per_class = [list(_fitting(c, by_kind.get(c.spec.kind, size))) for c in members]
        if not all(per_class):
            continue
        problem = _conflict([options[0] for options in per_class], placement)
        for combination in _without_conflict(per_class, placement):
            return combination
        refusal = refusal or problem
    if refusal is not None:
        raise refusal
    raise _no_block_size(members, block_size, by_kind)


def _with_like_pages(
    combination: tuple[ChosenClass, ...], placement: Placement, by_kind: Mapping[str, int]
) -> tuple[ChosenClass, ...]:
    """The same with as many tokens in a small page as its kernels take and the largest page has room for."""
    largest = max(c.page_bytes for c in combination)
    wider = tuple(c if c.members.spec.kind in by_kind else _widest(c, largest) for c in combination)
    return combination if _conflict(wider, placement) else wider


def _widest(chosen: ChosenClass, largest: int) -> ChosenClass:
    if chosen.members.spec.content.per_request:
        return chosen
    (kernels,) = [o.kernel_blocks for o in chosen.members.options if o.layout == chosen.layout.layout]
    for times in range(min(largest // chosen.page_bytes, LARGEST_AUTO_BLOCK // chosen.block_size), 1, -1):
        size = chosen.block_size * times
        kernel = kernels.fit(size)
        if kernel is not None:
            wider = ChosenClass(chosen.members, chosen.layout.layout.at(kernel), size)
            if wider.page_bytes <= largest:
                return wider
    return chosen


def _fitting(members: CacheClass, block_size: int) -> Iterator[ChosenClass]:
    if members.spec.content.per_request:
        yield ChosenClass(members, members.options[0].layout.at(1), 1)
        return
    for option in members.options:
        kernel = option.kernel_blocks.fit(block_size)
        if kernel is not None:
            yield ChosenClass(members, option.layout.at(kernel), block_size)


def _without_conflict(
    per_class: Sequence[Sequence[ChosenClass]], placement: Placement
) -> list[tuple[ChosenClass, ...]]:
    """Combinations that can share bytes, the one of least ranks in sum first; few, however many classes there are.

    Where one exists at all, it is block-first throughout, or field-first throughout with pages of one shape; in each
    case every class takes its first option of that form.
    """
    forms: dict[object, None] = {"block_first": None}
    forms |= dict.fromkeys(_shape(c) for c in per_class[0] if c.layout.field_first)
    found = []
    for form in forms:
        ranks = [
            next((r for r, c in enumerate(options) if ("block_first", _shape(c))[c.layout.field_first] == form), None)
            for options in per_class
        ]
        known = [r for r in ranks if r is not None]
        combination = tuple(options[r] for options, r in zip(per_class, known, strict=False))
        if len(known) == len(ranks) and _conflict(combination, placement) is None:
            found.append((sum(known), known, combination))
    return [combination for *_, combination in sorted(found, key=lambda f: f[:2])]


def _shape(chosen: ChosenClass) -> tuple[int, int]:
    """Runs and page bytes: field-first layouts share bytes only where both are equal."""
    return len(chosen.layout.places), chosen.page_bytes


def _conflict(combination: Sequence[ChosenClass], placement: Placement) -> LayoutError | None:
    first_kind = [c for c in combination if c.layout.field_first]
    if not first_kind:
        return None
    names = {str(c.members): f"{c.layout.layout.name} ({c.layout.layout.order})" for c in combination}
    if placement == "packed":
        return LayoutError(
            "placement packed takes block-first layouts only",
            field="cache.placement",
            got=names,
            allowed="block-first layouts, or cache.placement=slots",
        )
    if len(first_kind) < len(combination):
        return LayoutError(
            "a field-first layout cannot share a tensor with a block-first one: "
            "a block id would cover other bytes in each",
            field="layout",
            got=names,
            allowed="all field-first with equal page bytes, or all block-first",
            remedy="ask for a block-first layout, for example backends.torch.layout=hnd",
        )
    if len({_shape(c) for c in combination}) > 1:
        pages = {str(c.members): c.page_bytes for c in combination}
        return LayoutError(
            "field-first layouts share a tensor only where their pages have equal bytes",
            field="layout",
            got=pages,
            allowed="equal page bytes",
            remedy="ask for a block-first layout, for example backends.torch.layout=hnd",
        )
    return None


def _no_block_size(members: Sequence[CacheClass], block_size: int | None, by_kind: Mapping[str, int]) -> LayoutError:
    allowed = {str(c): " or ".join(f"{o.layout.name}: {o.kernel_blocks}" for o in c.options) for c in members}
    asked = next(
        (c.spec.kind for c in members if c.spec.kind in by_kind and not list(_fitting(c, by_kind[c.spec.kind]))), None
    )
    if asked is not None:
        return LayoutError(
            f"no layout of the chosen backend takes this block size for the {asked} caches",
            field=f"cache.block_size_by_kind.{asked}",
            got=by_kind[asked],
            allowed=allowed,
            remedy="give a multiple of every kernel block size, or leave it at auto",
        )
    return LayoutError(
        "no layout of the chosen backends takes this block size"
        if block_size
        else f"no block size up to {LARGEST_AUTO_BLOCK} is taken by all chosen backends",
        field="cache.block_size",
        got=block_size or "auto",
        allowed=allowed,
        remedy="give cache.block_size as a multiple of every kernel block size, or leave it at auto",
    )
