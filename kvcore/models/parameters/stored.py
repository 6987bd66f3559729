"""Bytes of weights in the type that a config stores them in: plain, or packed by a quantizer. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.parameters.weight import Weight
from kvcore.models.stated_cache import quantization
from kvcore.spec.dtypes import ceil_div, nbytes


@dataclass(frozen=True)
class Packing:
    """How a quantizer stores the matrix of a linear layer.

    Attributes:
        name: For people.
        bits: Bits of an element.
        block: (rows, columns) that share a scale; 0 is all of them.
        scale_bits: Bits of one scale, its zero point included.
        fixed_bits: Bits that every matrix adds.
        column_bits: Bits that every input adds (the order of columns of GPTQ).
    """

    name: str
    bits: int
    block: tuple[int, int]
    scale_bits: int
    fixed_bits: int = 0
    column_bits: int = 0

    def nbytes(self, weight: Weight) -> int:
        """Bytes of all copies of a matrix."""
        out, into = weight.shape
        rows, columns = self.block
        scales = (ceil_div(out, rows) if rows else 1) * (ceil_div(into, columns) if columns else 1)
        bits = out * into * self.bits + scales * self.scale_bits + into * self.column_bits + self.fixed_bits
        return weight.copies * ceil_div(bits, 8)


NVFP4 = Packing("NVFP4", 4, (1, 16), 8, 64)  # two more scales a matrix, in float32
MXFP4 = Packing("MXFP4", 4, (1, 32), 8)
FP8 = Packing("fp8", 8, (0, 0), 32)
FP8_ROWS = Packing("fp8 by row", 8, (1, 0), 32)
INT8_ROWS = Packing("int8 by row", 8, (1, 0), 32)
BY_ALGORITHM = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_ROWS,
    "FP8_PB_WO": Packing("fp8 in blocks", 8, (128, 128), 32),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP4": MXFP4,
    "MXFP8": Packing("MXFP8", 8, (1, 32), 8),
    "INT4_AWQ": Packing("AWQ", 4, (1, 128), 16),
    "W4A16_AWQ": Packing("AWQ", 4, (1, 128), 16),
}
# Other names of the same modules in checkpoints that do not follow transformers' own.
RENAMED = (
    ("self_attn", "attn"),
    ("mlp", "ffn"),
    ("mlp", "block_sparse_moe"),
    ("mlp", "mixer"),
    ("mlp.gate", "mlp.router"),
    ("lm_head", "head"),
)
# Below the model, whatever the parts of a multimodal checkpoint are called.
PREFIXES = re.compile(r"^(?:model\.|language_model\.|text_model\.)*")
WILD = re.compile(r"[*?\[]")
Choice = Callable[[str], Packing | None]


def stored_bytes(weight: Weight, dtype: str, packing: Choice) -> int:
    """Bytes of a weight: packed where it is the matrix of a linear layer that the quantizer took."""
    chosen = packing(weight.name) if weight.linear and len(weight.shape) == 2 else None
    return nbytes(dtype, weight.elements) if chosen is None else chosen.nbytes(weight)


def packing_of(fields: Fields) -> Choice:
    """Which packing each module has by the quantization that a config states.

    Raises:
        ModelError: The scheme is not known, or states no sizes.
    """
    stated = quantization(fields)
    if not stated:
        return lambda name: None
    base = _base(stated)
    if stated.get("expert_dtype", fields.get("expert_dtype")) == "fp4":
        experts: Packing | None = MXFP4
    else:
        experts = _by_algorithm(stated["moe_quant_algo"]) if stated.get("moe_quant_algo") else None
    listed, left_out = _by_module(stated), _matcher(stated)

    def choice(name: str) -> Packing | None:
        plain = PREFIXES.sub("", name)
        if plain == "lm_head" and not _takes_head(stated):
            return None
        if experts is not None and ".experts." in plain:
            return experts
        if left_out(plain):
            return None
        if base is None:
            found = [listed[path] for spelled in _spellings(plain) for path in _ancestors(spelled, listed)]
            return _by_algorithm(found[0]) if found else None
        return base

    return choice


def _by_module(stated: Mapping[str, Any]) -> dict[str, object]:
    """The algorithm of each module that `quantized_layers` names; experts of one layer are alike."""
    found: dict[str, object] = {}
    given = stated.get("quantized_layers")
    for name, scheme in given.items() if isinstance(given, Mapping) else ():
        before, experts, _ = str(name).partition(".experts.")
        module = PREFIXES.sub("", before + experts.rstrip("."))
        if module not in found:
            found[module] = scheme.get("quant_algo") if isinstance(scheme, Mapping) else scheme
    return found


def _base(stated: Mapping[str, Any]) -> Packing | None:
    """The packing of a module for which nothing else is said; None where each module says its own."""
    method, algorithm = stated.get("quant_method"), stated.get("quant_algo")
    block = stated.get("weight_block_size")
    if method == "fp8":
        return Packing("fp8", 8, (0, 0) if block is None else _block(block), 32)
    if isinstance(algorithm, str):
        return None if algorithm == "MIXED_PRECISION" else _by_algorithm(algorithm)
    if method in ("mxfp4", "fbgemm_fp8"):
        return MXFP4 if method == "mxfp4" else FP8_ROWS
    if method in ("gptq", "awq"):
        return _integers(stated, order=method == "gptq")
    if method == "bitsandbytes":
        return Packing("bitsandbytes", 4, (1, 64), 32) if stated.get("load_in_4bit") else INT8_ROWS
    groups = stated.get("config_groups")
    if isinstance(groups, Mapping) and len(groups) == 1:
        (group,) = groups.values()
        return _compressed(group.get("weights") if isinstance(group, Mapping) else None)
    raise _unknown(method or algorithm)


def _integers(stated: Mapping[str, Any], *, order: bool) -> Packing:
    bits, group = stated.get("bits"), stated.get("group_size", 128)
    if type(bits) is not int or type(group) is not int or bits not in (2, 3, 4, 8) or group == 0:
        raise _unknown(f"{stated.get('quant_method')} of {bits} bits")
    return Packing(f"int{bits}", bits, (1, max(group, 0)), 16 + bits, column_bits=32 if order else 0)


def _compressed(scheme: object) -> Packing:
    """A scheme of compressed-tensors."""
    if not isinstance(scheme, Mapping) or type(scheme.get("num_bits")) is not int:
        raise _unknown(scheme)
    bits, group, kind = scheme["num_bits"], scheme.get("group_size"), scheme.get("type", "int")
    strategy = scheme.get("strategy") or ("group" if group else "tensor")
    if kind == "float" and bits == 4:
        return NVFP4 if group == 16 else MXFP4
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise _unknown(scheme)
    if strategy in ("group", "tensor_group") and type(group) is int and group > 0:
        return Packing(f"{kind}{bits}", bits, (1, group), 16 if scheme.get("symmetric", True) else 16 + bits)
    if strategy == "block":
        return Packing(f"{kind}{bits}", bits, _block(scheme.get("block_structure") or (128, 128)), 32)
    return Packing(f"{kind}{bits}", bits, (0, 0) if strategy == "tensor" else (1, 0), 32)


def _block(given: object) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    sizes = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes):
        raise _unknown(f"blocks of {given}")
    return sizes[0], sizes[1]


def _by_algorithm(name: object) -> Packing:
    if not isinstance(name, str) or name not in BY_ALGORITHM:
        raise _unknown(name)
    return BY_ALGORITHM[name]


def _unknown(got: object) -> ModelError:
    return ModelError(
        "nothing tells how many bytes weights of this quantization take",
        field="quantization_config",
        got=got,
        allowed=["fp8", "mxfp4", "gptq", "awq", "bitsandbytes", "compressed-tensors", *sorted(BY_ALGORITHM)],
        remedy="set model.weight_bytes, or give the cache itself: cache.memory=BYTES",
    )


LISTS = ("ignore", "modules_to_not_convert", "exclude_modules", "modules_to_not_quantize")


def _takes_head(stated: Mapping[str, Any]) -> bool:
    """The output is left as it is unless the quantizer says otherwise."""
    return bool(stated.get("lm_head", False))


def _matcher(stated: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a module is among those that the quantizer left as they are.

    A name stands for itself and for all below it, ``*`` for anything, ``re:`` begins a regular expression.
    """
    lists = [stated[name] for name in LISTS if isinstance(stated.get(name), list)]
    listed = [p for patterns in lists for p in patterns if isinstance(p, str)]
    names = [PREFIXES.sub("", p) for p in listed if not p.startswith("re:")]
    exact = {p for p in names if not WILD.search(p)}  # hundreds, in some configs: too many for one expression
    patterns = [p[3:] for p in listed if p.startswith("re:")]
    patterns += [translate(p) for p in names if p not in exact]
    try:
        searched = re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None
    except re.error as error:
        raise _unknown(f"an expression that cannot be read: {error}") from error

    def matches(name: str) -> bool:
        return any(
            _ancestors(spelled, exact) or (searched is not None and searched.match(spelled) is not None)
            for spelled in _spellings(name)
        )

    return matches


def _ancestors(name: str, known: Collection[str]) -> list[str]:
    parts = name.split(".")
    return [path for i in range(len(parts)) if (path := ".".join(parts[: i + 1])) in known]


def _spellings(name: str) -> list[str]:
    """The name of a module as transformers and as other checkpoints write it."""
    return [name, *(name.replace(own, other) for own, other in RENAMED if own in name)]
