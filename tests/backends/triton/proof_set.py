"""The variants that are compiled in every run: all pairs of values of all axes, the target being one."""

import random
from itertools import combinations

from kvcore_triton.variants import PROVEN, Variant

AXES = {
    "target": PROVEN,
    "dtype": ("bfloat16", "float16", "float32"),
    "stored": ("same", "int8", "fp8_e4m3", "fp8_e5m2"),
    "granularity": ("tensor", "token_head"),
    "dims": ((64, 64), (120, 120), (128, 128), (192, 128), (256, 256)),
    "phase": ("decode", "prefill"),
    "general": (False, True),
}
FORMATS = (("same", "tensor"), ("int8", "token_head"), ("fp8_e5m2", "tensor"), ("fp8_e4m3", "token_head"))


def as_variant(row: dict) -> Variant:
    rest = {n: v for n, v in row.items() if n != "dims"}
    return Variant("attend", head_dim=row["dims"][0], head_dim_v=row["dims"][1], **rest)


def pairs_of(row: dict) -> set:
    # A plain cache has no scales: there a granularity says nothing.
    axes = [a for a in AXES if a != "granularity" or row["stored"] != "same"]
    return {(a, row[a], b, row[b]) for a, b in combinations(axes, 2)}


def wanted_pairs() -> set:
    """Every pair that some possible variant has."""
    every = {(a, x, b, y) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    every -= {("stored", "same", "granularity", g) for g in AXES["granularity"]}
    # Ampere does not convert e4m3.
    return every - {("target", "sm_80", "stored", "fp8_e4m3")}


def pairwise() -> list[Variant]:
    """A small set of variants of the attention kernel that has them all (greedy, the same every time)."""
    rng, left, rows = random.Random(5), wanted_pairs(), []
    while left:
        a, x, b, y = min(left, key=str)
        tried = []
        for _ in range(60):
            row = {n: rng.choice(v) for n, v in AXES.items()} | {a: x, b: y}
            if as_variant(row).possible() and (a, x, b, y) in pairs_of(row):
                tried.append(row)
        best = max(tried, key=lambda row: len(left & pairs_of(row)))
        left -= pairs_of(best)
        rows.append(best)
    for row in rows:
        row["granularity"] = "tensor" if row["stored"] == "same" else row["granularity"]
    return [as_variant(row) for row in rows]


def proof_set() -> list[Variant]:
    """The attention kernel pairwise, and for each target the merge and a write."""
    found = pairwise()
    for i, target in enumerate(PROVEN):
        stored, granularity = FORMATS[i % 3]
        found.append(Variant("write", target, stored=stored, granularity=granularity))
        found.append(Variant("merge", target, "float16", phase="prefill" if i % 2 else "decode"))
    return found


def table(results: dict) -> str:
    """A Markdown table of variants and what they take."""
    lines = ["| variant | registers | spilled bytes | shared memory, bytes | warps |", "|---|---:|---:|---:|---:|"]
    for name, r in sorted(results.items()):
        lines.append(f"| `{name}` | {r.registers} | {r.spilled_bytes} | {r.shared_bytes} | {r.warps} |")
    return "\n".join(lines) + "\n"
