"""How many bytes of 64 GiB are of use: after filling, and after ten rounds of freeing a random half and filling again.

python tests/benchmarks/bench_packing.py [--rounds N] [--only TEXT]

Beside it what vLLM's planner reports for the same caches: its concurrency, times what such a sequence has to keep. It
counts room for a step for each request.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

ARENA = 64 << 30
LENGTHS = (8192, 131072)


def main() -> None:
    """Print a table."""
    from support.packing import BUDGET, Packing, attention_shapes, hybrid_shapes, ideal_bytes

    from kvcore.errors import LayoutError
    from kvcore.plan.accounting import vllm_plan
    from kvcore.plan.capacity import Limits

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="shapes whose name has this text")
    asked = parser.parse_args()
    shapes = {**attention_shapes(), **hybrid_shapes("bfloat16"), **hybrid_shapes("fp8_e4m3")}
    print("| caches | tokens | filled | least after churn | large page MiB | vLLM's planner |")
    print("|---|---|---|---|---|---|")
    for name, caches in shapes.items():
        for length in LENGTHS if asked.only in name else ():
            packing = Packing(caches, length, ARENA)
            packing.fill()
            filled, least = packing.efficiency, 1.0
            for _ in range(asked.rounds):
                packing.churn()
                least = min(least, packing.efficiency)
            try:
                theirs = vllm_plan(
                    caches, ARENA, Limits(length, BUDGET), version="concurrency", block_size=16, prefix_caching=False
                )
                share = f"{theirs.concurrency * ideal_bytes(caches, length) / ARENA:.1%}"
            except LayoutError:
                share = "no plan"
            large = packing.plan.configs[0].large_page_bytes / 2**20
            print(f"| {name} | {length:,} | {filled:.2%} | {least:.2%} | {large:.1f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
