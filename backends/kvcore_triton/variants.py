"""Every kernel variant that the backend can launch, as data: what is compiled ahead of time to prove it.

A variant is what `triton.compile` sees: a kernel, the types of its arguments, its compile-time constants and
the tile. Masks, sinks, scales, log-sum-exps, block sizes and group sizes are run-time values and make none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kvcore_triton.arguments import SCALES, most_write_heads, unit_of
from kvcore_triton.targets import TARGETS, Target, Tile, compile_options, power_of_2, tile

# (head_dim, head_dim_v) of models in use; some are unlike, no powers of 2, or no multiples of 16.
DIMS = (
    (16, 16),
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (100, 100),
    (120, 120),
    (128, 128),
    (192, 128),
    (200, 200),
    (256, 256),
    (512, 512),
)
DTYPES = ("bfloat16", "float16", "float32")
FORMATS = ("same", "int8", "fp8_e4m3", "fp8_e5m2")
GRANULARITIES = ("tensor", "token_head")
PHASES = ("decode", "prefill")
PROVEN = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
POINTER = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int8": "*i8"}


@dataclass(frozen=True)
class Variant:
    """One variant of the attention, merge or write kernel.

    Attributes:
        kernel: ``attend``, ``merge`` or ``write``.
        target: Name of the target.
        dtype: Of the queries.
        stored: ``same``, or the cache's quantized dtype.
        granularity: Of its scales, for quantized caches.
        head_dim, head_dim_v: Dimensions.
        phase: ``decode`` or ``prefill``: the tile.
        general: Soft-cap and ALiBi are looked at.
        heads: KV heads of a program of the write kernel, 0 for the most.
    """

    kernel: str
    target: str
    dtype: str = "bfloat16"
    stored: str = "same"
    granularity: str = "tensor"
    head_dim: int = 128
    head_dim_v: int = 128
    phase: str = "decode"
    general: bool = False
    heads: int = 0

    @property
    def name(self) -> str:
        """A name for people and test ids."""
        dims = str(self.head_dim) + ("" if self.head_dim == self.head_dim_v else f"x{self.head_dim_v}")
        scales = "" if self.stored == "same" else f"/{self.granularity}"
        cache = "" if self.stored == "same" else f"-{self.stored}{scales}"
        general = "-general" if self.general else ""
        phase = "" if self.kernel == "write" else f"-{self.phase}"
        heads = f"-h{self.heads}" if self.heads else ""
        return f"{self.target}-{self.kernel}-{self.dtype}{cache}-d{dims}{phase}{general}{heads}"

    def tile(self) -> Tile:
        """The tile that the table gives it."""
        return tile(
            TARGETS[self.target],
            few=self.phase == "decode",
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            wide=self.dtype == "float32",
            quantized=self.stored != "same",
        )

    def possible(self) -> bool:
        """Whether the target has the cache's type."""
        return not self.stored.startswith("fp8") or self.stored in TARGETS[self.target].fp8

    def options(self) -> dict[str, int]:
        """How it is compiled."""
        target, sizes = TARGETS[self.target], self.tile()
        own = (sizes.num_warps, sizes.num_stages) if self.kernel == "attend" else ()
        return compile_options(target, *own)

    def signature(self) -> tuple[dict[str, str], dict[str, Any]]:
        """(type of each argument, value of each compile-time constant), by name."""
        return {"attend": _attend, "merge": _merge, "write": _write}[self.kernel](self)


def every(targets: tuple[str, ...] = PROVEN) -> Iterator[Variant]:
    """Every variant for some targets."""
    formats = [("same", "tensor"), *product(FORMATS[1:], GRANULARITIES)]
    for target, dtype, dims in product(targets, DTYPES, DIMS):
        plain = Variant("attend", target, dtype, head_dim=dims[0], head_dim_v=dims[1])
        merges = [replace(plain, kernel="merge", phase=phase) for phase in PHASES]
        coded = [replace(merge, stored="int8") for merge in merges]
        found = merges + [c for c, m in zip(coded, merges, strict=True) if c.tile().block_m != m.tile().block_m]
        heads = [h for h in (1, 2, 4, 8) if h <= most_write_heads(power_of_2(max(dims)))]
        for stored, granularity in formats:
            mine = replace(plain, stored=stored, granularity=granularity)
            found += [replace(mine, phase=p, general=g) for p, g in product(PHASES, (False, True))]
            found += [replace(mine, kernel="write", heads=h) for h in heads]
        yield from (v for v in found if v.possible())


def _cache_pointer(variant: Variant, target: Target) -> str:
    if variant.stored == "same":
        return POINTER[variant.dtype]
    fp8 = target.fp8.get(variant.stored)
    return f"*{fp8.triton}" if fp8 else POINTER[variant.stored]


def _scales(variant: Variant) -> int:
    return 0 if variant.stored == "same" else SCALES[variant.granularity]


def _dims(variant: Variant) -> dict[str, int]:
    d, dv = variant.head_dim, variant.head_dim_v
    return {"D": d, "DV": dv, "DP": power_of_2(d), "DVP": power_of_2(dv)}


def _units(variant: Variant, cache: str) -> dict[str, int]:
    """Units of strides; `cache` is the constant's name for the cache's."""
    stored = variant.dtype if variant.stored == "same" else variant.stored
    both = variant.head_dim, variant.head_dim_v
    return {"UNIT": unit_of(variant.dtype, *both), cache: unit_of(stored, *both)}


def _names(*names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


def _attend(variant: Variant) -> tuple[dict[str, str], dict[str, Any]]:
    target, sizes = TARGETS[variant.target], variant.tile()
    cache = _cache_pointer(variant, target)
    q = POINTER[variant.dtype]
    types = {"q_ptr": q, "k_ptr": cache, "v_ptr": cache}
    types |= _names("k_scale_ptr", "v_scale_ptr", "slopes_ptr", "sinks_ptr", kind="*fp32")
    types |= {"table_ptr": "*i32", "work_ptr": "*i32", "out_ptr": q}
    types |= _names("lse_ptr", "partial_ptr", "partial_lse_ptr", kind="*fp32")
    types |= {"scale": "fp32", "softcap": "fp32"}
    types |= _names(
        "window",
        "right",
        "chunk",
        "want_lse",
        "q_token",
        "q_head",
        "out_token",
        "out_head",
        "lse_token",
        "table_row",
        "k_block",
        "k_token",
        "k_head",
        "v_block",
        "v_token",
        "v_head",
        "k_scale_block",
        "k_scale_token",
        "k_scale_head",
        "v_scale_block",
        "v_scale_token",
        "v_scale_head",
        "block_size",
        "group",
        "heads",
        "tiles_per_head",
        kind="i32",
    )
    fp8 = target.fp8.get(variant.stored)
    constants = (
        _dims(variant)
        | _units(variant, "CACHE_UNIT")
        | {
            "BLOCK_M": sizes.block_m,
            "BLOCK_N": sizes.block_n,
            "SCALES": _scales(variant),
            "HALF_BYTES": fp8 is not None and fp8.half_bytes,
            "GENERAL": variant.general,
            "UPCAST": False,
        }
    )
    return types, constants


def _merge(variant: Variant) -> tuple[dict[str, str], dict[str, Any]]:
    types = _names("partial_ptr", "partial_lse_ptr", "sinks_ptr", kind="*fp32")
    types |= {"merge_ptr": "*i32", "out_ptr": POINTER[variant.dtype], "lse_ptr": "*fp32"}
    types |= _names("want_lse", "out_token", "out_head", "lse_token", "group", "heads", "tiles_per_head", kind="i32")
    constants = _dims(variant) | _units(variant, "CACHE_UNIT")
    constants |= {"BLOCK_M": variant.tile().block_m, "UPCAST": False}
    return types, {name: constants[name] for name in ("DV", "DVP", "BLOCK_M", "UNIT", "UPCAST")}


def _write(variant: Variant) -> tuple[dict[str, str], dict[str, Any]]:
    target = TARGETS[variant.target]
    fp8 = target.fp8.get(variant.stored)
    field = "*u8" if fp8 else POINTER[variant.dtype if variant.stored == "same" else variant.stored]
    value = POINTER[variant.dtype]
    types = {"k_ptr": value, "v_ptr": value, "k_field_ptr": field, "v_field_ptr": field}
    types |= {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32", "slots_ptr": "*i64"}
    types |= _names(
        "k_value_token",
        "k_value_head",
        "v_value_token",
        "v_value_head",
        "k_block",
        "k_token",
        "k_head",
        "v_block",
        "v_token",
        "v_head",
        "k_scale_block",
        "k_scale_token",
        "k_scale_head",
        "v_scale_block",
        "v_scale_token",
        "v_scale_head",
        "block_size",
        "num_heads",
        kind="i32",
    )
    dims = _dims(variant)
    constants: dict[str, Any] = (
        dims
        | _units(variant, "FIELD_UNIT")
        | {
            "HEADS": variant.heads or most_write_heads(max(dims["DP"], dims["DVP"])),
            "SCALES": _scales(variant),
            "FORMAT": 0 if variant.stored == "same" else (2 if fp8 else 1),
            "TOP": fp8.top if fp8 else 127.0,
            "MANTISSA": fp8.mantissa if fp8 else 3,
            "BIAS": fp8.bias if fp8 else 7,
            "SIGNED_ZERO": fp8.signed_zero if fp8 else True,
        }
    )
    return types, constants
