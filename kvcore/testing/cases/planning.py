"""From a case and a backend to a plan, through `kvcore.plan` and the backend's own layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.errors import BackendUnsupportedError, KVCoreError
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content
from kvcore.spec.dtypes import dtype
from kvcore.spec.layout import KernelBlocks, LayoutOption
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import Refused


@dataclass(frozen=True)
class Target:
    """Where cases run.

    Attributes:
        spec: The backend's declaration.
        options: Its options, stand-ins switched on where the device is missing.
        facts: The device.
        content: A plugin's content that stores what the cases store, or None.
    """

    spec: type[BackendSpec]
    options: Any
    facts: DeviceFacts
    content: type[Content] | None = None

    @property
    def device(self) -> str:
        """The torch device; stand-ins and CPUs run on the host."""
        on_gpu = self.facts.present and self.facts.kind in ("cuda", "rocm")
        return "cuda" if on_gpu else "cpu"


def layouts_of(spec: KVCacheSpec, target: Target) -> list[LayoutOption]:
    """All layouts that the backend offers.

    Raises:
        Refused: It refuses by name what lies in the cache, on this device or with these options.
    """
    try:
        return list(target.spec.layouts(spec, target.facts, target.options))
    except BackendUnsupportedError as error:
        raise Refused("layouts", f"{error.field}={error.got}", error.allowed or error.message) from error


def layout_options(case: Case, spec: KVCacheSpec, target: Target) -> list[LayoutOption]:
    """The backend's layouts that the case may use: all, or the block-first ones under `packed`.

    Raises:
        Refused: As `layouts_of`.
    """
    found = layouts_of(spec, target)
    if case.placement == "packed":
        found = [o for o in found if o.layout.order == "block_first"]
    return found


def offer(case: Case, spec: KVCacheSpec, target: Target) -> LayoutOffer:
    """The one layout and kernel block size of the case.

    Raises:
        Refused: The backend does not offer them.
    """
    found = layout_options(case, spec, target)
    if not found:
        shown = f"{spec.content.kind} as {case.stored_dtype}" + (f", {case.quant}" if case.quant else "")
        raise Refused("layouts", shown + (", packed" if case.placement == "packed" else ""), "none offered")
    option = found[min(case.layout, len(found) - 1)]
    # With ratio 1 the planner cuts the block as it would in an engine; another ratio is asked for exactly.
    size = option.kernel_blocks.fit(case.kernel_block_size)
    if size is None or (case.kernel_ratio > 1 and size != case.kernel_block_size):
        raise Refused("block_size", case.kernel_block_size, str(option.kernel_blocks))
    narrow = LayoutOption(option.layout, KernelBlocks(sizes=(size,)))
    return LayoutOffer(target.spec.name, (narrow,), target.spec.max_offset_bits)


def plan_case(
    case: Case, target: Target, *, extra_blocks: int = 8, elements: int = 0
) -> tuple[dict[CacheId, KVCacheSpec], KVCacheConfig]:
    """The caches of a case, and their plan.

    Args:
        case: The case.
        target: Backend and device.
        extra_blocks: Blocks beyond those that the step needs.
        elements: Least number of elements that the view of keys spans.

    Raises:
        Refused: A layout, block size or combination is refused.
    """
    mine = case.cache_spec()
    specs = {CacheId(i): mine for i in range(case.layers)}
    offers = dict.fromkeys(specs, offer(case, mine, target))
    if case.neighbour:
        other = case.beside()
        cache = CacheId(case.layers)
        specs[cache] = other.cache_spec()
        offers[cache] = offer(other, specs[cache], target)
    # The plan may give layers of one spec several groups, which hold blocks of their own.
    needed = len(specs) * sum(-(-s.length // case.block_size) for s in case.seqs) + extra_blocks
    needed = max(needed, case.least_blocks)
    limits = Limits(max(1, case.longest), max(1, case.tokens), max(1, len(case.seqs)))
    try:
        if case.placement == "slots":
            if elements:
                group = plan(specs, offers, Budget(num_blocks=2), limits, block_size=case.block_size).configs[0]
                stride = group.field_views(CacheId(0))[0].strides[0] // dtype(case.stored_dtype).bits * 8
                needed = elements // stride // case.kernel_ratio + 64
            budget = Budget(num_blocks=needed)
            return specs, plan(specs, offers, budget, limits, block_size=case.block_size).configs[0]
        return specs, _packed(specs, offers, limits, case.block_size, needed)
    except KVCoreError as error:
        raise Refused(error.field or "plan", error.got, error.allowed or error.message) from error


def _packed(
    specs: dict[CacheId, KVCacheSpec], offers: dict[CacheId, LayoutOffer], limits: Limits, block_size: int, needed: int
) -> KVCacheConfig:
    """The smallest packed arena, in powers of two, in which every group finds its blocks."""
    memory = 1 << 16
    while True:
        budget = Budget(memory=memory)
        config = plan(specs, offers, budget, limits, placement="packed", block_size=block_size).configs[0]
        pages = max(0, config.num_large_pages - 1) // len(config.kv_cache_groups)
        if all(pages * g.blocks_per_large_page >= needed for g in config.kv_cache_groups):
            return config
        memory *= 2
