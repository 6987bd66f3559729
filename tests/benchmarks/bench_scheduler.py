"""The scheduler without a model: decode steps, and the admission of requests beside as many that run; medians.

python tests/benchmarks/bench_scheduler.py [--before FOLDER] [--rounds N]

FOLDER is a worktree of another commit (`git worktree add FOLDER COMMIT`); its runs are interleaved with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OURS = Path(__file__).resolve().parents[2]
COUNTS = (8, 64, 256)
PROMPT, BLOCK_SIZE, DECODES = 100, 16, 32


def measure(count: int) -> dict[str, float]:
    """Microseconds of `schedule` and `update` with `count` decodes, and of `schedule` that admits as many more."""
    import numpy as np

    import kvcore
    from kvcore.engine.request import Request
    from kvcore.engine.sampling import SamplingParams
    from kvcore.engine.scheduler import Scheduler
    from kvcore.manage.manager import KVCacheManager
    from kvcore.plan.capacity import Limits
    from kvcore.plan.planner import Budget
    from kvcore.spec.cache_spec import CacheId, KVCacheSpec
    from kvcore.spec.content import KVHeads
    from kvcore.spec.retention import Full
    from kvcore.worker.messages import StepResult

    limits = Limits(4096, 1_000_000, 2 * count)
    specs = {CacheId(0): KVCacheSpec(KVHeads(1, 8), Full())}
    plan = kvcore.plan(specs, {}, Budget(num_blocks=2 * count * 16 + 300), limits, block_size=BLOCK_SIZE)
    scheduler = Scheduler(
        KVCacheManager(plan.configs[0]),
        max_model_len=4096,
        max_num_seqs=2 * count,
        max_num_batched_tokens=1_000_000,
        hit_unit=BLOCK_SIZE,
    )
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)

    def add(first: int) -> None:
        for i in range(first, first + count):
            scheduler.add(Request(f"r{i}", tuple(range(i, i + PROMPT)), sampling, i))

    def step() -> tuple[float, float]:
        begun = time.thread_time()
        output = scheduler.schedule()
        scheduled = time.thread_time()
        if output is None or len(output.rows) not in (count, 2 * count):
            sys.exit("the scheduler did not take all requests into the step")
        rows = len(output.rows)  # other commits take a tuple for each row
        tokens = np.full(rows, 7) if isinstance(output.rows, np.ndarray) else tuple((7,) for _ in range(rows))
        result = StepResult(output.step, tokens)
        answered = time.thread_time()
        scheduler.update(output, result)
        return scheduled - begun, time.thread_time() - answered

    add(0)
    step()
    decodes = [sum(step()) for _ in range(DECODES)]
    add(count)
    return {"decode": statistics.mean(decodes) * 1e6, "admit": step()[0] * 1e6}


def main() -> None:
    """Run each tree in processes of its own, in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="worktree to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one)))
        return
    if asked.rounds < 5:
        sys.exit("give at least 5 rounds: a median of fewer says little")
    trees = {"ours": OURS} | ({"before": asked.before.resolve()} if asked.before else {})
    print(f"median of {asked.rounds} interleaved rounds, us a step")
    for count in COUNTS:
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(asked.rounds):
            for name, tree in trees.items():
                command = [sys.executable, __file__, "--one", str(count)]
                found = subprocess.run(
                    command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(tree)}, text=True
                )
                taken[name].append(json.loads(found.stdout))
        for what in ("decode", "admit"):
            told = [f"{n} {statistics.median(r[what] for r in rounds):10,.0f}" for n, rounds in taken.items()]
            print(f"{what} {count:4}  " + "   ".join(told))


if __name__ == "__main__":
    main()
