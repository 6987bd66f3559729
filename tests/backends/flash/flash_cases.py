"""Cases of the conformance kit for what the two backends must serve, with short steps over large pages."""

from __future__ import annotations

import zlib

from kvcore.testing import Case, Seq

# Features that both must serve, as changes to a case.
BOTH = {
    "float16": {},
    "bfloat16": {"dtype": "bfloat16"},
    "head_dim=128": {"head_dim": 128},
    "head_dim=256": {"head_dim": 256, "num_kv_heads": 1},
    "gqa=1": {"gqa": 1},
    "gqa=3": {"gqa": 3},
    "gqa=5": {"gqa": 5, "num_kv_heads": 1},
    "gqa=8": {"gqa": 8, "num_kv_heads": 1},
    "window": {"window": 7},
    "window.tail": {"window": 7, "own_retention": True},
    "window.long": {"window": 300, "own_retention": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.3},
    "bidirectional": {"causal": False},
    "lse": {"lse": True},
    "lse.window": {"lse": True, "window": 5},
    "layout=1": {"layout": 1},
    "packed": {"placement": "packed", "layers": 2},
    "two_groups": {"layers": 2, "neighbour": "window"},
}
FLASH_ATTN = BOTH | {
    "alibi": {"alibi": True},
    "lse.alibi": {"alibi": True, "lse": True},
    "lse.alibi.window": {"alibi": True, "lse": True, "window": 9},
    "lse.alibi.long_window": {"alibi": True, "lse": True, "window": 5000},
    "lse.alibi.bidirectional": {"alibi": True, "lse": True, "causal": False},
    "bidirectional+window": {"causal": False, "window": 4},
    "block_size=512": {"block_size": 512},
    "kernel_ratio=2": {"block_size": 512, "kernel_ratio": 2},
}
FLASHINFER = BOTH | {
    "pages=32": {"block_size": 32},
    "pages=64": {"block_size": 64},
    "kernel_ratio=2": {"block_size": 64, "kernel_ratio": 2},
    "fp8_e4m3": {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.5, "v_scale": 2.0},
    "fp8_e5m2": {"cache_dtype": "fp8_e5m2", "quant": "tensor", "k_scale": 0.5, "v_scale": 2.0},
    "fp8.lse": {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.25, "lse": True},
    "fp8.hnd.bfloat16": {"dtype": "bfloat16", "cache_dtype": "fp8_e4m3", "quant": "tensor", "layout": 1},
}


def steps(page: int) -> dict[str, tuple[Seq, ...]]:
    """Steps of few queries around the edges of a page."""
    return {
        "decode": (Seq(page - 1, 1), Seq(page, 1), Seq(3, 1), Seq(page + 5, 1)),
        "prefill": (Seq(0, 1), Seq(0, 3), Seq(0, page + 2)),
        "chunked": (Seq(page - 2, 5), Seq(9, 2), Seq(page, 3)),
        "mixed": (Seq(page, 1), Seq(page + 7, 1), Seq(0, 5), Seq(page - 1, 4)),
        "multi_token": (Seq(page - 1, 3), Seq(8, 3), Seq(2 * page - 1, 3)),
    }


def case(name: str, phase: str, page: int, **changes) -> Case:
    """One case; the step is cut for the page size."""
    made = f"L2.attend.{name}.{phase}"
    settings = {"dtype": "float16", "head_dim": 64, "block_size": page} | changes
    seqs = settings.pop("seqs", None) or steps(settings["block_size"])[phase]
    return Case(made, "L2", "attend", phase=phase, seqs=seqs, seed=zlib.crc32(made.encode()) % 10_000, **settings)


PLAIN = ("float16", "bfloat16", "alibi", "softcap")


def cases(features: dict, page: int) -> list[Case]:
    """Every feature in the phases that differ most; some in all."""
    made = []
    for name, changes in features.items():
        phases = steps(page) if name in PLAIN else ("decode", "mixed", "chunked")
        # The one row of a decode is the last of its sequence: causal or not, it sees the same keys.
        shown = [p for p in phases if p != "decode" or changes.get("causal", True)]
        made += [case(name, phase, page, **changes) for phase in shown]
    return made
