"""Levels 0 and 1: declarations and cache writes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kvcore.testing.cases import axes as ax
from kvcore.testing.cases.builder import CaseBuilder, claimed_blocks
from kvcore.testing.cases.case import Case

DECLARATION = (
    "contract",
    "options",
    "no_torch",
    "devices",
    "fails_closed",
    "refusals",
    "layouts",
    "page_bytes",
    "stand_ins",
    "stable",
    "core_profile",
)


def level_0(m: CaseBuilder) -> Iterator[Case]:
    """What the declaration says of itself; no kernel runs."""
    for name in DECLARATION:
        yield Case(f"L0.{name}", "L0", name, dtype=m.base.dtype, head_dim=m.base.head_dim, block_size=m.base.block_size)


def level_1(m: CaseBuilder) -> Iterator[Case]:
    """What a write leaves in memory, byte for byte."""
    p, d = m.base.block_size, m.base.head_dim

    def write(what: str, phase: str = "mixed", **changes: object) -> Case:
        return m.case("L1", "write", what, phase, **changes)

    for phase in ax.PHASES:
        yield write("base", phase, layers=2, tier="quick" if phase in ("mixed", "prefill") else "full")
        yield write("layout=1", phase, layout=1, layers=2, tier="quick" if phase == "mixed" else "full")
    for variant in ("padding", "all_padding", "repeat", "chunks", "fused"):
        yield write(variant, variant=variant)
        yield write(f"{variant}.layout=1", variant=variant, layout=1, tier="full")
    for ratio in (2, 4):
        yield write(f"kernel_ratio={ratio}", kernel_ratio=ratio, layers=2)
        yield write(f"kernel_ratio={ratio}.layout=1", kernel_ratio=ratio, layout=1)
    yield write("placement=packed", placement="packed", layers=2, neighbour="window")
    yield write("placement=packed.ratio", placement="packed", layers=3, kernel_ratio=2)
    yield write("two_groups", layers=2, neighbour="window")
    yield write("two_groups.padding", neighbour="window", variant="padding", tier="full")
    yield write("window.tail", "multi_token", window=p + 1, window_name="P+1", own_retention=True)
    for n in (1, 4, 16, 64):
        if n != p:
            yield write(f"block_size={n}", block_size=n, tier="quick" if n in (1, 16) else "full")
    yield write("block_size=3P", block_size=3 * p)  # no power of two
    yield from claimed_blocks(m, "L1", "write", "mixed")
    yield write("gqa=all", num_kv_heads=1, gqa=8)
    yield m.latent("L1", "write", "mixed", layers=2)
    yield m.latent("L1", "write", "multi_token", placement="packed", layers=2, tier="full")
    yield write("heads=5", num_kv_heads=5, gqa=1)
    yield write("head_dim_v", head_dim=2 * d, head_dim_v=d, layers=2)
    for n in (64, 72, 80, 120, 128, 256, 320):
        yield write(f"head_dim={n}", head_dim=n, tier="full" if n in (64, 128, 256) else "quick")
    yield write("head_dim=72.float16", head_dim=72, dtype="float16")
    yield write("head_dim=100.bfloat16", head_dim=100, dtype="bfloat16")
    for name in ("float32", "float16", "bfloat16", "float64"):
        if name != m.base.dtype:
            yield write(f"dtype={name}", dtype=name)
            yield write(f"cache_dtype={name}", cache_dtype=name)
    for name, changes in ax.QUANTIZED.items():
        for i, scale in enumerate(ax.SCALES):
            other = ax.SCALES[(i + 1) % len(ax.SCALES)]
            tier = "quick" if i == 0 else "full"
            yield write(
                f"cache_dtype={name}.scale={scale}", layers=2, k_scale=scale, v_scale=other, tier=tier, **changes
            )
        yield write(f"cache_dtype={name}.zeros", variant="zeros", **changes)
        yield write(
            f"cache_dtype={name}.packed", placement="packed", layers=2, neighbour="window", kernel_ratio=2, **changes
        )
        yield write(f"cache_dtype={name}.padding", variant="padding", **changes)
    yield write(
        "cache_dtype=fp8_e4m3_tensor.layers=12", "decode", layers=12, k_scale=0.3, **ax.QUANTIZED["fp8_e4m3_tensor"]
    )
    # A constant scale can be too small for a token: codes must stop at the largest, and not wrap round or be NaN.
    for stored, quant in product(("int8", "fp8_e4m3", "fp8_e5m2"), ("tensor", "head", "token_head")):
        yield write(
            f"cache_dtype={stored}_{quant}.saturate",
            variant="saturate",
            cache_dtype=stored,
            quant=quant,
            k_scale=0.05,
            v_scale=0.03,
            layers=2,
        )
