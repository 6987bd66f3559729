"""Random steps: lengths, masks, formats and placements that nobody thought of together. Imports no torch.

Drawn from a fixed seed, so that a case has the same name and content on every machine and in every run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from kvcore.testing.cases import axes as ax
from kvcore.testing.cases.builder import CaseBuilder
from kvcore.testing.cases.case import Case, Seq

COUNT, QUICK = 240, 12


def random_steps(m: CaseBuilder) -> Iterator[Case]:
    """`COUNT` cases of level 3, the first `QUICK` of them at level quick."""
    for number in range(COUNT):
        rng = random.Random(9000 + number)
        changes = _features(rng, m)
        ratio = changes["kernel_ratio"]
        changes["seqs"] = _lengths(rng, m.base.block_size * ratio)
        tier = "quick" if number < QUICK else "full"
        yield m.case("L3", "attend", f"random{number}", "random", tier=tier, **changes)


def _lengths(rng: random.Random, block: int) -> tuple[Seq, ...]:
    """Up to four sequences, those with one token and a cached prefix first."""
    seqs = []
    for _ in range(rng.randint(1, 4)):
        scheduled = rng.choice((1, 1, rng.randint(2, 5), rng.randint(1, 2 * block)))
        seqs.append(Seq(rng.choice((0, block, rng.randint(0, 3 * block))), scheduled))
    return tuple(sorted(seqs, key=lambda s: not (s.scheduled == 1 and s.computed > 0)))


def _features(rng: random.Random, m: CaseBuilder) -> dict[str, Any]:
    p, d = m.base.block_size, m.base.head_dim

    def some(value: Any, otherwise: Any, share: float = 0.3) -> Any:
        return value if rng.random() < share else otherwise

    changes: dict[str, Any] = {
        "kernel_ratio": rng.choice((1, 1, 2, 4)),
        "gqa": rng.choice((1, 2, 3, 4)),
        "num_kv_heads": rng.choice((1, 2, 3)),
        "layers": rng.choice((1, 1, 2)),
        "placement": rng.choice(("slots", "slots", "packed")),
        "neighbour": some(rng.choice(("window", "float16")), "", 0.2),
        "poison": rng.choice(("nan", "inf", "extreme")),
        "softcap": some(1.5, None),
        "alibi": some(True, False),
        "sinks": some(True, False),
        "scale": some(0.3, None),
        "lse": some(True, False, 0.5),
        "head_dim_v": some(2 * d, 0, 0.2),
        "dtype": some(rng.choice(("float16", "bfloat16")), m.base.dtype, 0.2),
    }
    mask = rng.choice(("causal", "window", "window", "chunk", "bidirectional"))
    if mask in ("window", "chunk"):
        changes |= {mask: rng.randint(1, 2 * p), "own_retention": some(True, False, 0.5)}
    elif mask == "bidirectional":
        changes["causal"] = False
    if rng.random() < 0.2:
        name = rng.choice(sorted(ax.QUANTIZED))
        changes |= {**ax.QUANTIZED[name], "k_scale": rng.choice(ax.SCALES), "v_scale": rng.choice(ax.SCALES)}
    if changes["neighbour"] == "float16" and changes["dtype"] == "float16":
        changes["neighbour"] = "window"
    return changes
