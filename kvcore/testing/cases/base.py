"""Finds out how a backend can run here, and the plainest problem that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from kvcore.attention.declaration import API_VERSION, BackendSpec, DeviceFacts
from kvcore.attention.device import gpu_facts
from kvcore.errors import BackendError
from kvcore.spec.dtypes import ceil_div
from kvcore.spec.layout import KernelBlocks, LayoutOption
from kvcore.testing.cases.answers import asking, reasoned, well_formed
from kvcore.testing.cases.axes import LATENT
from kvcore.testing.cases.case import Base, Case
from kvcore.testing.cases.outcome import DECLARED, PROOFS, Refused
from kvcore.testing.cases.planning import Target, layouts_of

DTYPES = ("float32", "float16", "bfloat16", "float64")
HEAD_DIMS = (32, 64, 128, 96, 80, 256, 192, 16)
# Tokens of a block that is large enough to cut.
ENOUGH = 8
# Multiples of n that a kernel for powers of two lacks; 544 tokens were such a page in the field (A18).
ODD_MULTIPLES, ODD_SIZE = (17, 34), 544


class Opened(NamedTuple):
    """A backend that can be asked.

    Attributes:
        target: Its declaration, the options in use and the device.
        missing: Why nothing can run here, or None.
        proof: What a pass proves; ``declared`` where nothing can run.
    """

    target: Target
    missing: str | None
    proof: str


def here() -> DeviceFacts:
    """The device of this machine."""
    return gpu_facts() or DeviceFacts("cpu")


def open_backend(spec: type[BackendSpec], options: Any, facts: DeviceFacts) -> Opened:
    """Ask a declaration how it can run.

    Args:
        spec: The declaration, of whatever contract version.
        options: An instance of its `Config`; None is the default.
        facts: The device.

    Raises:
        BackendError: It speaks another contract version, raises, or gives an answer that is none.
    """
    version = getattr(spec, "api_version", None)
    if version != API_VERSION:
        # Nothing else can be asked: another version may have other methods.
        name = getattr(spec, "name", spec)
        raise BackendError(f"backend {name} speaks contract version {version}, this core speaks {API_VERSION}")
    with asking():
        options = spec.Config() if options is None else options
    target, missing = switch_on(spec, options, facts)
    with asking():
        proof = spec.proof(target.options, facts)
    if proof not in PROOFS:
        raise BackendError(f"proof() says {proof!r}; allowed: {', '.join(PROOFS)}")
    return Opened(target, missing, DECLARED if missing else proof)


def switch_on(spec: type[BackendSpec], options: Any, facts: DeviceFacts) -> tuple[Target, str | None]:
    """Options with which the backend runs on `facts`, and what is missing when there are none.

    Where library or device are missing, its stand-ins are tried one by one, best first.

    Returns:
        The target, and None or the reason why nothing can run.

    Raises:
        BackendError: The declaration raises, or gives an answer that is none.
    """
    with asking():
        reason = _missing(spec, options, facts)
        if reason is None:
            return Target(spec, options, facts), None
        for option in spec.stand_ins:
            other = replace(options, **{option: True})
            if _missing(spec, other, facts) is None:
                return Target(spec, other, facts), None
        return Target(spec, options, facts), reason


def _missing(spec: type[BackendSpec], options: Any, facts: DeviceFacts) -> str | None:
    gone = reasoned(spec.unavailable(options), "unavailable")
    if gone is not None:
        return gone
    refused = spec.unsupported_device(facts, options)
    well_formed(refused, f"unsupported_device({facts.name or facts.kind})")
    return None if refused is None else f"no device here that it serves: {refused}"


def find_base(target: Target) -> Base:
    """The first mask, dtype and head dimension that the backend takes, in its smallest blocks of 8 or more.

    What it takes none of stays as it is by default, and is refused in the cases.

    Raises:
        BackendError: The declaration raises.
    """
    with asking():
        return _with_latents(_with_heads(Base(), target), target)


def content_refused(target: Target) -> str | None:
    """Why the backend serves nothing that is stored as the target's content, or None.

    Raises:
        BackendError: The declaration raises.
    """
    base = find_base(target)
    with asking():
        plain = Case("base", "L0", "base", dtype=base.dtype, head_dim=base.head_dim)
        case = plain.storing(target.content)
        if case is None:
            return f"content={target.content and target.content.kind} cannot stand in for keys and values"
        refused = target.spec.unsupported(case.query(), target.options)
        if refused is not None:
            return str(refused)
        return None if _taken(plain, target) else f"no layout is offered for content={case.kind}"


def _with_heads(base: Base, target: Target) -> Base:
    for causal, dtype, dim in product((True, False), DTYPES, HEAD_DIMS):
        found = _taken(Case("base", "L0", "base", causal=causal, dtype=dtype, head_dim=dim), target)
        if found:
            size, claimed = smallest_block(found[0].kernel_blocks), claimed_blocks(found)
            return base._replace(dtype=dtype, head_dim=dim, block_size=size, kernel_blocks=claimed)
    return base


def _with_latents(base: Base, target: Target) -> Base:
    for dtype in DTYPES:
        found = _taken(Case("base", "L0", "base", dtype=dtype, **LATENT), target)
        if found:
            size = smallest_block(found[0].kernel_blocks)
            return base._replace(latent_dtype=dtype, latent_block_size=size)
    return base


def _taken(plain: Case, target: Target) -> list[LayoutOption]:
    """The layouts in which the backend takes the case; none where it does not take it at all."""
    case = plain.storing(target.content)
    if case is None or target.spec.unsupported(case.query(), target.options) is not None:
        return []
    try:
        return layouts_of(case.cache_spec(), target)
    except Refused:
        return []


def smallest_block(blocks: KernelBlocks) -> int:
    """The smallest size of at least 8 tokens that is declared, else the largest below."""
    if blocks.multiple_of is not None:
        return ceil_div(ENOUGH, blocks.multiple_of) * blocks.multiple_of
    return min(blocks.sizes, key=lambda size: (size < ENOUGH, abs(size - ENOUGH)))


def claimed_blocks(options: Sequence[LayoutOption]) -> tuple[tuple[int, ...], ...]:
    """Per layout, the block sizes that its declaration claims: all of a list, odd ones among multiples.

    A layout that declares what the first one declares gets none: its sizes are asked already.
    """
    first = options[0].kernel_blocks
    rest = [o.kernel_blocks for o in options[1:]]
    return (_claimed(first), *(() if blocks == first else _claimed(blocks) for blocks in rest))


def _claimed(blocks: KernelBlocks) -> tuple[int, ...]:
    if blocks.multiple_of is None:
        return tuple(sorted(set(blocks.sizes)))
    found = {factor * blocks.multiple_of for factor in ODD_MULTIPLES}
    return tuple(sorted(found | ({ODD_SIZE} if blocks.fit(ODD_SIZE) == ODD_SIZE else set())))
