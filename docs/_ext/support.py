"""The support matrix: what each backend declares, and with which proof it passes here."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from kvcore.registry.loader import installed
from kvcore.testing import Base, Case, Seq, run
from kvcore.testing.cases.base import find_base, here, switch_on
from kvcore.testing.cases.planning import Target

# A row of the matrix, as changes to the plainest case that a backend takes.
FEATURES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "head dimension 64": {"head_dim": 64},
    "head dimension 80": {"head_dim": 80},
    "head dimension 128": {"head_dim": 128},
    "head dimension 256": {"head_dim": 256},
    "values of another dimension": {"head_dim": 128, "head_dim_v": 64},
    "5 query heads a KV head": {"gqa": 5},
    "window": {"window": 5},
    "chunks": {"chunk": 9},
    "bidirectional": {"causal": False},
    "soft-cap": {"softcap": 1.5},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": True},
    "log-sum-exp": {"lse": True},
    "packed placement": {"placement": "packed"},
    "kernel blocks of half a block": {"kernel_ratio": 2},
    "fp8 cache, a scale a tensor": {"cache_dtype": "fp8_e4m3", "quant": "tensor"},
    "int8 cache, a scale a token and head": {"cache_dtype": "int8", "quant": "token_head"},
}


def support(docs: Path) -> str:
    """One row a feature, one column a backend: the proof level of a pass, or the fact that refuses it."""
    backends = sorted(installed().backends)
    columns = {name: column(name) for name in backends}
    lines = ["| | " + " | ".join(f"`{n}`" for n in backends) + " |", "|---" * (len(backends) + 1) + "|"]
    for feature in FEATURES:
        lines.append(f"| {feature} | " + " | ".join(columns[n][feature] for n in backends) + " |")
    return "\n".join(lines) + "\n"


def column(name: str) -> dict[str, str]:
    """What one backend says to every feature, on the machine where the docs are built."""
    spec = installed().backends[name]
    target, missing = switch_on(spec, spec.Config(), here())
    base = find_base(target)
    cases = {feature: _case(feature, base, dict(changes)) for feature, changes in FEATURES.items()}
    if missing is not None:
        return {feature: _declared(target, case) for feature, case in cases.items()}
    found = {r.case.id: r for r in run(name, list(cases.values()), probe_refused=False)}
    return {feature: _cell(found[case.id]) for feature, case in cases.items()}


def _case(feature: str, base: Base, changes: dict[str, Any]) -> Case:
    page = base.block_size * changes.get("kernel_ratio", 1)
    name = f"L2.attend.{feature}"
    facts = {"dtype": base.dtype, "head_dim": base.head_dim, "block_size": page} | changes
    seed = zlib.crc32(name.encode()) % 10_000
    seqs = (Seq(page + 3, 1), Seq(page - 1, 3))
    return Case(name, "L2", "attend", phase="support", seqs=seqs, seed=seed, **facts)


def _declared(target: Target, case: Case) -> str:
    """What a backend says that cannot run here."""
    refusal = target.spec.unsupported(case.query(), target.options)
    return "declared" if refusal is None else f"no: {refusal.field}"


def _cell(result: Any) -> str:
    if result.outcome == "failed":
        raise RuntimeError(f"{result.backend} fails {result.case.id}: {result.reason}")
    if result.outcome == "passed":
        return result.proof
    if result.outcome == "unsupported":
        return f"no: {result.reason.partition('=')[0]}"
    return str(result.outcome)
