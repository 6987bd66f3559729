"""Numbers for which what is rounded too early is out of tolerance. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.testing.cases.builder import CaseBuilder
from kvcore.testing.cases.case import Case, Seq

# By kind of numbers (`Case.data`): few keys where they decide a row, many where sums are about it.
FEW = {"decode": (Seq(40, 1), Seq(300, 1), Seq(90, 1)), "multi_token": (Seq(60, 4), Seq(90, 11), Seq(0, 40))}
MANY = {"decode": (Seq(300, 1), Seq(1100, 1), Seq(700, 1)), "multi_token": (Seq(600, 4), Seq(1090, 11), Seq(0, 40))}
STEPS = {"large": FEW, "low": FEW, "even": MANY, "flat": MANY}


def precise(m: CaseBuilder) -> Iterator[Case]:
    """Scores, probabilities, sums and log-sum-exps under 16-bit queries; float32 beside them at level full."""
    for data, steps in STEPS.items():
        for n, dtype in enumerate(("float16", "bfloat16", "float32")):
            for k, (phase, seqs) in enumerate(steps.items()):
                for lse in (False, True):
                    quick = dtype != "float32" and (lse or data in ("even", "flat") or (n + k) % 2 == 0)
                    yield m.attend(
                        f"data={data}.{dtype}" + (".lse" if lse else ""),
                        phase,
                        seqs=seqs,
                        data=data,
                        dtype=dtype,
                        head_dim=128,
                        num_kv_heads=1,
                        lse=lse,
                        tier="quick" if quick else "full",
                    )
