"""What a checkpoint says of its own cache: the scheme that its quantizer wrote down. No torch.

compressed-tensors writes an object ``kv_cache_scheme``, others a name there; ModelOpt writes ``kv_cache_quant_algo``,
within `config.json` or beside it in ``hf_quant_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.json_file import read_object
from kvcore.models.nesting import TEXT_PARTS

HF_QUANT_CONFIG = "hf_quant_config.json"
# The objects of a config that say how it was quantized, and where those keep a part of what they say.
HF_SECTION = "hf_quant_config"
SECTIONS = ("quantization_config", "compression_config", HF_SECTION)
INNER = ("quantization", "config_groups")
SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")
# Schemes given by name. ``static`` and ``dynamic`` say only where the scales come from, in checkpoints of fp8.
NAMES = {
    "FP8": "fp8_e4m3",
    "FP8_E4M3": "fp8_e4m3",
    "FP8_E5M2": "fp8_e5m2",
    "STATIC": "fp8_e4m3",
    "DYNAMIC": "fp8_e4m3",
    "INT8": "int8",
}
NUMBERS: Mapping[tuple[str, object], str] = {("float", 8): "fp8_e4m3", ("int", 8): "int8", ("int", 4): "int4"}
STRATEGIES = {"tensor": "tensor", "attn_head": "head", "token": "token_head"}
PLAIN = (None, "", "auto", "none", "NONE", "None")


class CacheStatement(NamedTuple):
    """What a checkpoint says of its cache.

    Attributes:
        where: The field that says it.
        said: Its value.
        dtype: The element type that it means, or None where kvcore has none like it.
        scales: The granularity of scales that it means, or None where it is silent.
    """

    where: str
    said: object
    dtype: str | None
    scales: str | None = None


def cache_statement(config: Mapping[str, Any]) -> CacheStatement | None:
    """The scheme that a parsed `config.json` states for its cache, at any level; None where it states none.

    Raises:
        ModelError: A scheme is malformed, or two of them disagree.
    """
    found: dict[str, CacheStatement] = {}
    level: Any = config
    while isinstance(level, Mapping):
        for name in SECTIONS:
            section = level.get(name)
            if isinstance(section, Mapping):
                found |= dict(_statements(section, name))
        level = next((level[part] for part in TEXT_PARTS if level.get(part)), None)
    meant = {(s.dtype, s.scales) for s in found.values()}
    if len({d for d, _ in meant}) > 1 or len({s for _, s in meant if s}) > 1:
        raise ModelError(
            "the checkpoint states two schemes for its cache",
            field=[*found][1],
            got={s.where: s.said for s in found.values()},
            allowed="one",
            remedy="remove one of them",
        )
    return max(found.values(), key=lambda s: s.scales is not None, default=None)


def _statements(section: Mapping[str, Any], where: str) -> list[tuple[str, CacheStatement]]:
    found = []
    for name in SCHEMES:
        given, at = section.get(name), f"{where}.{name}"
        if not isinstance(given, str | None) or given not in PLAIN:
            found.append((at, _scheme(given, at)))
    for name, value in section.items():
        if isinstance(value, Mapping) and (name in INNER or where.endswith(".config_groups")):
            found += _statements(value, f"{where}.{name}")
    return found


def _scheme(given: object, where: str) -> CacheStatement:
    if isinstance(given, str):
        return CacheStatement(where, given, NAMES.get(given.upper()))
    if not isinstance(given, Mapping):
        raise ModelError(f"{where} is no scheme of a cache", field=where, got=given, allowed="an object, or a name")
    bits, kind, strategy = given.get("num_bits"), given.get("type", "int"), given.get("strategy")
    whole = isinstance(bits, int) and not isinstance(bits, bool)
    if not whole or not isinstance(kind, str) or not isinstance(strategy, str | None):
        raise ModelError(f"{where} is no scheme of a cache", field=where, got=dict(given), allowed="num_bits and type")
    known = (strategy is None or strategy in STRATEGIES) and given.get("symmetric") is not False
    scales = None if strategy is None else STRATEGIES.get(strategy)
    return CacheStatement(where, dict(given), NUMBERS.get((kind, bits)) if known else None, scales)


def quantization(fields: Fields) -> Mapping[str, Any]:
    """How the weights were quantized; empty where they were not, be the cache's type stated or not."""
    found = fields.mapping("quantization_config", "compression_config")
    beside = fields.outer.get(HF_SECTION)
    inner = beside.get("quantization", beside) if isinstance(beside, Mapping) else None
    return found or (inner if isinstance(inner, Mapping) and inner.get("quant_algo") else {})


def read_hf_quant_config(folder: Path) -> dict[str, Any]:
    """What ModelOpt wrote beside `config.json`; empty where there is no such file.

    Raises:
        ModelError: The file cannot be read, or holds no JSON object.
    """
    file = folder / HF_QUANT_CONFIG
    return read_object(file) if file.is_file() else {}
