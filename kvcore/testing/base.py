"""Finds out how a backend can run here, and the plainest problem that it takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from kvcore.attention.spec import BackendSpec, DeviceFacts
from kvcore.testing.axes import LATENT
from kvcore.testing.cases import Base, Case
from kvcore.testing.outcome import Refused
from kvcore.testing.planning import Place, layouts_of

DTYPES = ("float32", "float16", "bfloat16", "float64")
HEAD_DIMS = (32, 64, 128, 96, 80, 256, 192, 16)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 4, 2, 1)


def here() -> DeviceFacts:
    """The device of this machine."""
    import torch

    if not torch.cuda.is_available():
        return DeviceFacts("cpu")
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return DeviceFacts("rocm", properties.name, arch=properties.gcnArchName.partition(":")[0])
    return DeviceFacts("cuda", properties.name, (properties.major, properties.minor))


def switch_on(spec: type[BackendSpec], options: Any, facts: DeviceFacts) -> tuple[Place, str | None]:
    """Options with which the backend runs on `facts`, and what is missing when there are none.

    Where library or device are missing, its stand-ins are tried one by one, best first.

    Returns:
        The place, and None or the reason why nothing can run.
    """
    reason = _missing(spec, options, facts)
    if reason is None:
        return Place(spec, options, facts), None
    for option in spec.stand_ins:
        other = replace(options, **{option: True})
        if _missing(spec, other, facts) is None:
            return Place(spec, other, facts), None
    return Place(spec, options, facts), reason


def _missing(spec: type[BackendSpec], options: Any, facts: DeviceFacts) -> str | None:
    gone = spec.unavailable(options)
    if gone is not None:
        return gone
    refused = spec.unsupported_device(facts, options)
    return None if refused is None else f"no device here that it serves: {refused}"


def find_base(place: Place) -> Base:
    """The first dtype, head dimension and block size that the backend takes, else the defaults."""
    base = Base()
    for dtype, dim in product(DTYPES, HEAD_DIMS):
        size = _block_size(Case("base", "L0", "base", dtype=dtype, head_dim=dim), place)
        if size is not None:
            base = base._replace(dtype=dtype, head_dim=dim, block_size=size)
            break
    for dtype in DTYPES:
        size = _block_size(Case("base", "L0", "base", dtype=dtype, **LATENT), place)
        if size is not None:
            return base._replace(latent_dtype=dtype, latent_block_size=size)
    return base


def _block_size(case: Case, place: Place) -> int | None:
    """The block size to ask the case with, or None where the backend does not take it at all."""
    if place.spec.unsupported(case.query(), place.options) is not None:
        return None
    try:
        options = layouts_of(case.cache_spec(), place)
    except Refused:
        return None
    for option in options:
        for size in BLOCK_SIZES:
            if option.kernel_blocks.fit(size) == size:
                return size
    return None
