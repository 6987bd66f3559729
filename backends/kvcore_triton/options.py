"""Options of the Triton backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.backend import ConfigError


@dataclass(frozen=True)
class TritonOptions:
    """Options of the Triton backend; 0 takes the value of the device's table.

    Attributes:
        interpret: Run the kernels in Triton's interpreter, on a CPU; slow, for finding faults.
        num_splits: Programs that share the keys of one tile of queries.
        block_m: Query rows of a tile, a power of 2 from 16.
        block_n: Keys of one iteration, a power of 2 from 16.
        num_warps: Warps of a program, a power of 2.
        num_stages: Stages of the software pipeline.
    """

    interpret: bool = False
    num_splits: int = 0
    block_m: int = 0
    block_n: int = 0
    num_warps: int = 0
    num_stages: int = 0

    def __post_init__(self) -> None:
        power = "0, or a power of 2"
        _check("num_splits", self.num_splits, 1, 1024, False, "0 to 1024")
        _check("block_m", self.block_m, 16, 256, True, f"{power} from 16 to 256")
        _check("block_n", self.block_n, 16, 256, True, f"{power} from 16 to 256")
        _check("num_warps", self.num_warps, 1, 32, True, f"{power} up to 32")
        _check("num_stages", self.num_stages, 1, 8, False, "0 to 8")


def _check(name: str, value: object, low: int, high: int, power: bool, allowed: str) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and (value == 0 or low <= value <= high)
    if not good or (power and isinstance(value, int) and value & (value - 1)):
        raise ConfigError(
            f"{name} of the Triton backend cannot be {value!r}",
            field=f"backends.triton.{name}",
            got=value,
            allowed=allowed,
        )
