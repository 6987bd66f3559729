"""What only size shows: long contexts, large steps, many sequences, wide tables, many heads. Imports no torch.

Each size meets each feature that accumulates over it, one by one, so that a backend without one of them is still asked
the others. What is not about a size stays small: few heads where the context is long, short contexts where the heads
are many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

from kvcore.testing.cases.builder import CaseBuilder
from kvcore.testing.cases.case import Case, Seq

Changes = dict[str, Any]
CONTEXTS = (256, 512, 1024, 4096)
SEQUENCES = (33, 129, 300)
# Query heads and KV heads: up to 128 and 64; groups of 1 to 32, and one of 71, which no tile of a power of two fits.
HEADS = ((40, 8), (64, 4), (64, 2), (64, 32), (16, 16), (32, 4), (128, 8), (64, 64), (71, 1))
# Past what 15 bits count, and past 32 partitions of 1,024 keys.
FAR = 33_000
# Features whose facts are one number a head.
PER_HEAD: Mapping[str, Changes] = {
    "base": {},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True, "lse": True},
    "fp8_e5m2_head": {"cache_dtype": "fp8_e5m2", "quant": "head", "k_scale": 0.3, "v_scale": 0.3},
    "int8_token_head": {"cache_dtype": "int8", "quant": "token_head"},
}


def sizes(m: CaseBuilder) -> Iterator[Case]:
    """The cases of level 2 that are about size."""
    yield from _contexts(m)
    yield from _far(m)
    yield from _prefills(m)
    yield from _deep(m)
    yield from _exact(m)
    yield from _steps(m)
    yield from _many_sequences(m)
    yield from _many_blocks(m)
    yield from _heads(m)
    # What a 16-byte vector of halves divides, and what it does not.
    for dim, dtype in ((72, "float16"), (100, "bfloat16"), (320, "float16")):
        for phase in ("decode", "mixed"):
            quick = "quick" if (dim == 100) == (phase == "mixed") else "full"
            yield m.attend(f"head_dim={dim}.{dtype}", phase, head_dim=dim, dtype=dtype, tier=quick)


def over_keys(context: int) -> dict[str, Changes]:
    """Every feature that accumulates over keys, for sequences of about `context` tokens.

    The window starts and the chunk ends within a partition of the field's sizes, hundreds of keys from either end.
    """
    span = context // 2 + 37
    return {
        "base": {},
        "sinks": {"sinks": True},
        "lse": {"lse": True},
        "alibi": {"alibi": True},
        "softcap": {"softcap": 2.5},
        "fp8_e4m3_tensor": {"cache_dtype": "fp8_e4m3", "quant": "tensor", "k_scale": 0.3},
        "int8_token_head": {"cache_dtype": "int8", "quant": "token_head"},
        "window": {"window": span},
        "window.tail": {"window": span, "own_retention": True},
        "chunk": {"chunk": span},
        "everything": {"window": span, "softcap": 2.5, "alibi": True, "sinks": True, "lse": True, "scale": 0.25},
    }


def around(context: int, phase: str) -> tuple[Seq, ...]:
    """A step on, before, after and well past a number of keys, with one short sequence beside them."""
    past = context + context // 4 + 5
    if phase == "decode":
        return Seq(context - 1, 1), Seq(context, 1), Seq(past, 1), Seq(context - 2, 1), Seq(6, 1)
    return Seq(context, 1), Seq(6, 1), Seq(context - 3, 6), Seq(past - 17, 17)


def _contexts(m: CaseBuilder) -> Iterator[Case]:
    """Contexts past each partition size, with every feature that sums over keys."""
    for n, context in enumerate(CONTEXTS):
        turns = cycle(("decode", "multi_token") if n % 2 else ("multi_token", "decode"))
        features = over_keys(context)
        features |= {
            "head_dim_v": {"head_dim_v": 2 * m.base.head_dim},
            "layout=1": {"layout": 1},
            "layers=2": {"layers": 2, "num_kv_heads": 1},
        }
        for name, changes in features.items():
            first = next(turns)
            for phase in ("decode", "multi_token"):
                # A plain context is asked both ways: decode and prefill are kernels of their own.
                quick = phase == first or name == "base"
                yield m.attend(
                    f"context={context}.{name}",
                    phase,
                    seqs=around(context, phase),
                    tier="quick" if quick else "full",
                    **changes,
                )


def _far(m: CaseBuilder) -> Iterator[Case]:
    """A context of tens of thousands of tokens, and windows and chunks as long as those of models."""
    features = over_keys(FAR)
    features["window"] = {"window": 4096}
    features["chunk"] = {"chunk": 8192}
    for name in ("base", "sinks", "lse", "alibi", "softcap", "window", "chunk"):
        yield m.attend(
            f"context={FAR}.{name}",
            "decode",
            seqs=(Seq(FAR, 1), Seq(6, 1)),
            num_kv_heads=1,
            tier="quick" if name in ("base", "alibi", "window") else "full",
            **features[name],
        )


def _prefills(m: CaseBuilder) -> Iterator[Case]:
    """Hundreds of rows of one sequence, from nothing and behind a cached prefix."""
    p = m.base.block_size
    few = {"num_kv_heads": 1}
    for rows in (300, 600):
        features = over_keys(rows)
        features["bidirectional"] = {"causal": False}
        for name, changes in features.items():
            quick = rows == 300 or name in ("base", "window", "chunk")
            for computed in (0, 2 * p + 3):
                yield m.attend(
                    f"rows={rows}.{name}",
                    "prefill" if computed == 0 else "chunked",
                    seqs=(Seq(computed, rows), Seq(0, 5)),
                    tier="quick" if quick and (computed > 0) == (name in _BEHIND) else "full",
                    **few,
                    **changes,
                )


# Asked behind a cached prefix at level quick, the others from nothing.
_BEHIND = ("window", "chunk", "sinks", "fp8_e4m3_tensor", "softcap")


def _deep(m: CaseBuilder) -> Iterator[Case]:
    """A prefill of many rows that begins past a thousand cached tokens."""
    for name, changes in over_keys(1100).items():
        yield m.attend(f"rows=130.deep.{name}", "chunked", seqs=(Seq(1100, 130),), num_kv_heads=1, **changes)


def _exact(m: CaseBuilder) -> Iterator[Case]:
    """Rows, tokens and sequences that fill tiles and buckets to the last place, so that nothing of them is padding."""
    p = m.base.block_size
    for rows in (64, 128, 256):
        yield m.attend(f"rows={rows}.base", "prefill", seqs=(Seq(0, rows),), num_kv_heads=1)
        yield m.attend(f"rows={rows}.base", "chunked", seqs=(Seq(p, rows),), num_kv_heads=1, tier="full")
    for count in (32, 128, 256):
        seqs = tuple(Seq(1 + (5 * i) % (3 * p), 1) for i in range(count))
        tier = "full" if count == 256 else "quick"
        yield m.attend(f"sequences={count}.base", "decode", seqs=seqs, num_kv_heads=1, tier=tier)


def _steps(m: CaseBuilder) -> Iterator[Case]:
    """More than a thousand tokens in one step."""
    p = m.base.block_size
    decodes = tuple(Seq(p + i, 1) for i in range(9))
    seqs = (*decodes, Seq(0, 290), Seq(p, 310), Seq(0, 120), Seq(3 * p + 1, 333))
    for name in ("base", "lse", "alibi", "sinks", "window", "int8_token_head"):
        changes = over_keys(256)[name]
        quick = "quick" if name in ("base", "sinks") else "full"
        yield m.attend(f"tokens=1062.{name}", "mixed", seqs=seqs, num_kv_heads=1, tier=quick, **changes)


def _many_sequences(m: CaseBuilder) -> Iterator[Case]:
    """Many rows of unlike length, of one token and of several."""
    p = m.base.block_size
    features: dict[str, Changes] = {
        "base": {},
        "sinks": {"sinks": True},
        "alibi": {"alibi": True},
        "lse": {"lse": True},
        "window.tail": {"window": p + 3, "own_retention": True},
        "fp8_e4m3_tensor": {"cache_dtype": "fp8_e4m3", "quant": "tensor"},
    }
    for n, count in enumerate(SEQUENCES):
        decodes = [Seq(1 + (5 * i) % (3 * p), 1) for i in range(count)]
        several = [Seq((3 * i) % (2 * p), 2 + i % 3) for i in range(count - count // 2)]
        for i, (name, changes) in enumerate(features.items()):
            for phase, seqs in (("decode", decodes), ("mixed", decodes[: count // 2] + several)):
                quick = name == "base" or (phase == "decode") == ((i + n) % 2 == 0)
                yield m.attend(
                    f"sequences={count}.{name}",
                    phase,
                    seqs=tuple(seqs),
                    num_kv_heads=1,
                    tier="quick" if quick else "full",
                    **changes,
                )


def _many_blocks(m: CaseBuilder) -> Iterator[Case]:
    """Rows of more than 64 and 128 blocks."""
    p = m.base.block_size
    for count in (64, 128):
        seqs = (Seq(count * p, 1), Seq((count + 9) * p + 2, 1), Seq(3, 1))
        several = (Seq(3, 1), Seq(count * p - 1, 5))
        for name, changes in (("base", {}), ("window.tail", {"window": (count - 8) * p + 1, "own_retention": True})):
            few = {"num_kv_heads": 1, **changes}
            yield m.attend(f"blocks={count}.{name}", "decode", seqs=seqs, **few)
            quick = "quick" if name == "base" else "full"
            yield m.attend(f"blocks={count}.{name}", "multi_token", seqs=several, tier=quick, **few)


def _heads(m: CaseBuilder) -> Iterator[Case]:
    """Many heads of both kinds, with facts that differ by head and by layer."""
    p = m.base.block_size
    steps = {
        "decode": (Seq(2 * p + 1, 1), Seq(p - 1, 1), Seq(3, 1)),
        "mixed": (Seq(p, 1), Seq(0, p + 3), Seq(p + 1, 4)),
    }
    for n, (heads, kv_heads) in enumerate(HEADS):
        mine = {"num_kv_heads": kv_heads, "gqa": heads // kv_heads, "layers": 2}
        for i, (name, changes) in enumerate(PER_HEAD.items()):
            for k, (phase, seqs) in enumerate(steps.items()):
                quick = "quick" if (n + i + k) % 2 == 0 else "full"
                yield m.attend(f"heads={heads}x{kv_heads}.{name}", phase, seqs=seqs, tier=quick, **mine, **changes)
