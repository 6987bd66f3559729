"""Levels 3 to 5: memory that may not be read, log-sum-exp, determinism. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvcore.testing.cases import axes as ax
from kvcore.testing.cases.builder import CaseBuilder
from kvcore.testing.cases.case import Case, Seq
from kvcore.testing.cases.random_steps import random_steps


def level_3(m: CaseBuilder) -> Iterator[Case]:
    """Poison, placement, strides, empty requests, offsets, several groups, several steps."""
    case = partial(m.case, "L3")
    p = m.base.block_size
    window = {"window": p + 1, "window_name": "P+1"}
    masks: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": window,
        "window.tail": window | {"own_retention": True},
        "window=1": {"window": 1, "window_name": "1"},
        "chunk": {"chunk": p + 3},
        "bidirectional": {"causal": False},
        "bidirectional+window": {"causal": False, "window": 4},
        "sinks": {"sinks": True},
    }
    for poison in ("inf", "nan", "extreme"):
        for i, (name, changes) in enumerate(masks.items()):
            for phase in ("mixed", "decode", "chunked"):
                if not changes.get("causal", True) and phase == "decode":
                    continue
                quick = poison != "nan" and phase == ("mixed", "decode", "chunked")[i % 3]
                yield case(
                    "attend",
                    f"poison={poison}.{name}",
                    phase,
                    poison=poison,
                    tier="quick" if quick else "full",
                    **changes,
                )
        for name, quant in ax.QUANTIZED.items():
            yield case(
                "attend",
                f"poison={poison}.{name}",
                "mixed",
                poison=poison,
                **quant,
                tier="quick" if poison == "extreme" else "full",
            )
    for ratio in (1, 2, 4):
        yield case("placement", f"permuted.kernel_ratio={ratio}", "mixed", kernel_ratio=ratio)
    for last in (1, p - 1, p):
        seqs = (Seq(2 * p + last - 1, 1), Seq(0, p + last))
        yield case("attend", f"last_block={last}", "ragged", seqs=seqs)
        yield case("attend", f"last_block={last}.ratio", "ragged", seqs=seqs, block_size=2 * p, kernel_ratio=2)
    yield case("padded", "empty_rows", "decode")
    yield case("padded", "empty_rows.sinks", "decode", sinks=True)
    yield case("attend", "first_chunk_token", "chunk_edge", seqs=(Seq(p, 1), Seq(p - 1, 2), Seq(2 * p, p)))
    yield case("attend", "one_token", "single", seqs=(Seq(0, 1),))
    yield case("attend", "many_rows", "many", tier="full", seqs=tuple(Seq(1 + 3 * i % (3 * p), 1) for i in range(40)))
    yield case("steps", "two_steps", "mixed")
    yield case("steps", "two_steps.window", "mixed", own_retention=True, **window)
    yield case("steps", "two_steps.ratio", "mixed", kernel_ratio=2)
    yield from _walks(m)
    for kin in ("window", "chunk", "scale", "softcap", "sinks", "alibi", "all"):
        layers = 4 if kin == "all" else 3
        for phase in ("mixed", "decode"):
            quick = kin == "all" or (phase == "mixed") == (kin in ("window", "scale", "alibi"))
            yield case("attend", f"kin={kin}", phase, kin=kin, layers=layers, tier="quick" if quick else "full")
    for placement in ("slots", "packed"):
        for neighbour in ("window", "float16", "float64"):
            if neighbour == m.base.dtype:
                continue
            yield case(
                "attend",
                f"two_groups={neighbour}.{placement}",
                "mixed",
                layers=2,
                neighbour=neighbour,
                placement=placement,
            )
        yield case("attend", f"layers=3.{placement}", "decode", layers=3, placement=placement, kernel_ratio=2)
    many: dict[str, dict[str, Any]] = {
        "base": {},
        "alibi": {"alibi": True},
        "sinks": {"sinks": True},
        "fp8_e4m3_tensor": {**ax.QUANTIZED["fp8_e4m3_tensor"], "k_scale": 0.3, "v_scale": 0.3},
    }
    for name, changes in many.items():
        yield case("attend", f"layers=12.{name}", "decode", layers=12, **changes)
    for name, quant in ax.QUANTIZED.items():
        yield case(
            "attend",
            f"packed.{name}",
            "mixed",
            placement="packed",
            layers=2,
            kernel_ratio=2,
            neighbour="float32",
            k_scale=0.3,
            **quant,
        )
    for phase in ("decode", "mixed"):
        yield case("offsets", "offsets>2^31", phase)
        yield case("attend", "ids>2^16", phase, least_blocks=2**16 + 2**12)
    yield from random_steps(m)


def _walks(m: CaseBuilder) -> Iterator[Case]:
    """Many steps of unlike shape on one cache; the same step twice."""
    p = m.base.block_size
    ways: dict[str, dict[str, Any]] = {
        "base": {"layers": 2},
        "window.tail": {"window": p + 3, "own_retention": True},
        "sinks": {"sinks": True, "lse": True},
        "alibi": {"alibi": True},
        "kin": {"kin": "window", "layers": 3},
        "two_groups": {"neighbour": "window"},
        "ratio": {"kernel_ratio": 2},
        "fp8_e4m3_tensor": {**ax.QUANTIZED["fp8_e4m3_tensor"], "k_scale": 0.3},
        "int8_token_head": ax.QUANTIZED["int8_token_head"],
        "packed": {"placement": "packed", "layers": 2},
    }
    for name, changes in ways.items():
        yield m.case("L3", "walk", name, "walk", seqs=_walked(p), **changes)
        quick = name in ("base", "sinks", "kin", "fp8_e4m3_tensor")
        yield m.case("L3", "twice", name, "mixed", tier="quick" if quick else "full", **changes)
    for size in (1, 4, 16, 64, 128):
        if size != p:
            tier = "quick" if size in (1, 16) else "full"
            yield m.case("L3", "walk", f"block_size={size}", "walk", block_size=size, seqs=_walked(size), tier=tier)


def _walked(p: int) -> tuple[Seq, ...]:
    """Sequences long enough for more than ten steps, at the edges of blocks."""
    return Seq(p - 1, 40), Seq(0, 2 * p + 30), Seq(2 * p, 17), Seq(0, 9), Seq(3, 25)


def level_4(m: CaseBuilder) -> Iterator[Case]:
    """The log-sum-exp, what it includes, merges by it, and capture."""
    case = partial(m.case, "L4")
    p = m.base.block_size
    features: dict[str, dict[str, Any]] = {
        "base": {},
        "sinks": {"sinks": True},
        "softcap": {"softcap": 1.5},
        "scale": {"scale": 0.3},
        "alibi": {"alibi": True},
        "window": {"window": p + 1},
        "gqa=all": {"num_kv_heads": 1, "gqa": 8},
        "layout=1": {"layout": 1},
        "float16": {"dtype": "float16"},
        "bfloat16": {"dtype": "bfloat16"},
        "head_dim=128": {"head_dim": 128},
    }
    phases = ("mixed", "decode", "chunked")
    for i, (name, changes) in enumerate(features.items()):
        for phase in phases:
            tier = "quick" if phase == phases[i % 3] else "full"
            yield case("attend", f"lse.{name}", phase, lse=True, tier=tier, **changes)
    for name, changes in ax.QUANTIZED.items():
        yield case("attend", f"lse.{name}", "mixed", lse=True, k_scale=0.3, **changes)
    yield case("padded", "lse.empty_rows", "decode", lse=True)
    yield case("padded", "lse.empty_rows.sinks", "decode", lse=True, sinks=True)
    parts: dict[str, dict[str, Any]] = {"base": {}, "softcap": {"softcap": 1.5}, "gqa": {"gqa": 4}}
    for name, changes in parts.items():
        yield case("merge", f"split.{name}", "split", lse=True, seqs=(Seq(p + 2, 1), Seq(2 * p - 1, 1)), **changes)
    yield case("capture", "graph", "decode")


def level_5(m: CaseBuilder) -> Iterator[Case]:
    """Bits that must repeat, where the declaration says so."""
    case = partial(m.case, "L5")
    for phase in ("mixed", "decode"):
        yield case("deterministic", "repeat", phase)
        yield case("batch_invariant", "alone", phase)
    yield case("deterministic", "repeat.lse", "decode", lse=True)
    yield case("batch_invariant", "alone.lse", "decode", lse=True)
    yield case("deterministic", "repeat.sinks", "mixed", sinks=True, tier="full")
    yield case("batch_invariant", "alone.window", "mixed", window=m.base.block_size, tier="full")
