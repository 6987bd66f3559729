"""Element types by name, with their width; the logical half knows dtypes only by name."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import SpecError


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: The name used in configurations and fingerprints.
        bits: Width of one element in bits.
        torch_name: Attribute of `torch` with the storage type; packed types are stored as bytes.
        is_float: Whether NaN or Inf can be written in it.
        quantized: Whether values need a scale to be read back.
        poison: Bit pattern, as a signed integer of the element's width (of the byte for packed types), that a correct
            program never uses: a quiet NaN where the type has one, else its most extreme code.
        largest: The largest code of a quantized type, at which writes saturate; its negative is the smallest.
    """

    name: str
    bits: int
    torch_name: str
    is_float: bool
    poison: int
    quantized: bool = False
    largest: float = 0.0


_ALL = (
    DType("float64", 64, "float64", True, 0x7FF8_0000_0000_0000),
    DType("float32", 32, "float32", True, 0x7FC0_0000),
    DType("float16", 16, "float16", True, 0x7E00),
    DType("bfloat16", 16, "bfloat16", True, 0x7FC0),
    DType("fp8_e4m3", 8, "float8_e4m3fn", True, 0x7F, quantized=True, largest=448.0),
    DType("fp8_e5m2", 8, "float8_e5m2", True, 0x7F, quantized=True, largest=57344.0),
    DType("int8", 8, "int8", False, -128, quantized=True, largest=127.0),
    DType("int4", 4, "uint8", False, -120, quantized=True, largest=7.0),  # 0x88: both halves are -8
    DType("uint8", 8, "uint8", False, -1),
    DType("int32", 32, "int32", False, -(2**31)),
    DType("int64", 64, "int64", False, -(2**63)),
)
DTYPES = {d.name: d for d in _ALL}


def dtype(name: str) -> DType:
    """The `DType` called `name`; `SpecError` names the known ones otherwise."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise SpecError("unknown dtype", field="dtype", got=name, allowed=sorted(DTYPES)) from None


def nbytes(name: str, count: int) -> int:
    """Bytes of `count` elements of dtype `name`; packed types must fill whole bytes."""
    bits = dtype(name).bits * count
    if bits % 8:
        raise SpecError(
            "packed elements do not fill whole bytes",
            field="dtype",
            got=f"{count} x {name}",
            allowed="an even number of elements",
        )
    return bits // 8


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return ceil_div(value, multiple) * multiple


def positive(field: str, value: object) -> int:
    """`value` as an int >= 1, or a `SpecError` that names `field`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{field} must be a positive integer", field=field, got=value, allowed=">= 1")
    return value
