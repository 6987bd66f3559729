"""What each class of device has, and the tile sizes for it: tables, no measuring on the way.

Imports neither torch nor triton: declarations ask here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.backend import DeviceFacts


class Fp8(NamedTuple):
    """How a target stores one of the fp8 types, and in which type the attention kernel loads it.

    Attributes:
        triton: Triton's name of the loaded type.
        torch_name: Torch's name of the stored one.
        top: Largest finite value.
        mantissa, bias: Mantissa bits, exponent bias.
        signed_zero: Whether -0 has a code of its own (else that code is NaN).
    """

    triton: str
    torch_name: str
    top: float
    mantissa: int
    bias: int
    signed_zero: bool = True

    @property
    def half_bytes(self) -> bool:
        """Whether it is loaded as bytes, each the upper half of a float16."""
        return self.triton == "u8"


E4M3 = Fp8("fp8e4nv", "float8_e4m3fn", 448.0, 3, 7)
E4M3_FNUZ = Fp8("fp8e4b8", "float8_e4m3fnuz", 240.0, 3, 8, signed_zero=False)
# The byte is the upper half of a float16: no instruction of a newer device is needed to read it. (Triton 3.6
# emits one even for sm_80, whose assembler then refuses it.)
E5M2 = Fp8("u8", "float8_e5m2", 57344.0, 2, 15)
E5M2_FNUZ = Fp8("fp8e5b16", "float8_e5m2fnuz", 57344.0, 2, 16, signed_zero=False)


@dataclass(frozen=True)
class Target:
    """A class of devices.

    Attributes:
        name: ``interpreter``, ``sm_80``, ..., ``gfx942``, ...
        shared_bytes: Shared memory that one program may use.
        processors: Programs that run at once, where the device itself cannot be asked.
        fp8: The fp8 types that it converts, by dtype name of the cache.
        min_split_keys: Fewest keys that are worth a program of their own.
        warp: Threads of a warp.
    """

    name: str
    shared_bytes: int
    processors: int
    fp8: Mapping[str, Fp8] = field(default_factory=dict)
    min_split_keys: int = 256
    warp: int = 32


BOTH = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
TARGETS = {
    t.name: t
    for t in (
        # 163 KiB on an A100, but its class-mates 8.6 and 8.9 have 99 KiB, and share its tiles.
        Target("sm_80", 101_376, 108, {"fp8_e5m2": E5M2}),
        Target("sm_89", 101_376, 128, BOTH),
        Target("sm_90", 232_448, 132, BOTH),
        Target("sm_100", 232_448, 148, BOTH),
        Target("sm_120", 101_376, 170, BOTH),
        Target("gfx942", 65_536, 304, {"fp8_e4m3": E4M3_FNUZ, "fp8_e5m2": E5M2_FNUZ}, warp=64),
        Target("gfx950", 163_840, 256, BOTH, warp=64),
        Target("gfx1100", 65_536, 96, {"fp8_e5m2": E5M2}),
        # Small enough that tests see several programs, several iterations and split keys.
        Target("interpreter", 1 << 30, 4, BOTH, min_split_keys=32),
    )
}
# Compute capabilities from which a target's tables hold, newest first.
_CUDA = (((12, 0), "sm_120"), ((10, 0), "sm_100"), ((9, 0), "sm_90"), ((8, 9), "sm_89"), ((8, 0), "sm_80"))


def target_of(facts: DeviceFacts, *, interpret: bool = False) -> Target | None:
    """The target of a device, or None where there is none."""
    if interpret:
        return TARGETS["interpreter"]
    if facts.kind == "cuda":
        # An unknown capability is taken for a recent one: a device that is here always tells.
        capability = facts.capability or (9, 0)
        return next((TARGETS[name] for least, name in _CUDA if capability >= least), None)
    if facts.kind == "rocm":
        return TARGETS.get(facts.arch.split(":")[0])
    return None


# Targets whose matrix units leave room in the registers for the largest tiles.
LARGE = ("sm_90", "sm_100")


class Tile(NamedTuple):
    """Rows and keys of a program, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def compile_options(target: Target, num_warps: int = 4, num_stages: int = 2) -> dict[str, int]:
    """How a kernel is compiled, the register limit of CUDA devices included.

    The limit is what a processor's 65,536 registers give each thread. Told so, the assembler takes the
    registers that it needs; left alone it spills some to fit one more program onto the processor.
    """
    found = {"num_warps": num_warps, "num_stages": num_stages}
    if target.name.startswith("sm_"):
        found["maxnreg"] = min(255, 65_536 // (32 * num_warps))
    return found


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n` and 16, the least that a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


def tile(target: Target, *, few: bool, head_dim: int, head_dim_v: int, wide: bool, quantized: bool) -> Tile:
    """The tile sizes for one launch.

    Args:
        target: Where it runs.
        few: Every sequence has at most 16 query rows a KV head (decode, multi-token decode).
        head_dim: Of keys.
        head_dim_v: Of values.
        wide: Queries are float32, which multiplies without tensor cores.
        quantized: Codes and numbers of the same keys are in registers at once.
    """
    if target.name == "interpreter":
        return Tile(16, 32, 1, 1)
    dim = max(power_of_2(head_dim), power_of_2(head_dim_v))
    large = target.name in LARGE
    if wide:
        return Tile(16, 32 if dim <= 64 else 16, 4 if dim <= 128 else 16, 1)
    if dim > 256:
        # With 32 rows sm_90 stands at its last register, and one variant spills.
        return Tile(16 if few or target.name == "sm_90" else 32, 32, 8, 1)
    # Rows that do not start at whole vectors are loaded in pieces, each with an address of its own.
    pieces = head_dim % 8 or head_dim_v % 8
    if dim > 128:
        # sm_90 has codes and numbers in registers; sm_100 keeps its sums elsewhere.
        tall = large and not pieces and not (quantized and target.name == "sm_90")
        return Tile(16, 32, 8, 2) if few else Tile(64 if tall else 32, 32, 8, 2)
    if few:
        return Tile(16, 32 if quantized and dim > 64 else 64, 4, 2)
    if pieces and dim > 64:
        return Tile(32, 32, 8, 2)
    if large:
        # Scales, and masks of what lies between a dim and its power of 2, take registers of their own.
        masked = dim > 64 and min(head_dim, head_dim_v) < dim
        return Tile(64, 32 if quantized and masked else 64, 4, 2)
    return Tile(64, 32 if dim > 64 else 64, 8, 2)
