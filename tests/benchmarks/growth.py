"""How the cost of a step, and the memory, grow with the pool, the prompt and the requests that run.

python tests/benchmarks/growth.py [--plot FILE.png]

A decode step of 64 requests over pools of 10^3 to 10^6 blocks, half of them cached; admission of prompts of 1k to 1M
tokens, a token; a step of 1 to 2,048 requests. CPU time, medians of 7. Bytes are what Python counts (`tracemalloc`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from bare import SIZE
from bench_control_plane import Ours, now

Points = list[tuple[int, float]]


def fill(mine: Ours, blocks: int) -> None:
    """Cache so many blocks that nobody holds."""
    rng = np.random.default_rng(0)
    while blocks > 0:
        count = min(blocks, 4096)
        row = mine.manager.begin(rng.integers(0, 32_000, count * SIZE).tolist())
        mine.prefill(row)
        mine.manager.free([row])
        blocks -= count


def by_pool() -> Points:
    """Microseconds of a decode step of 64 requests, over 16 steps, by blocks of the pool."""
    found = []
    for blocks in (1_000, 10_000, 100_000, 1_000_000):
        mine = Ours(blocks)
        fill(mine, blocks // 2)
        rows = mine.running(64, 64, random.Random(0))
        found.append((blocks, steps(mine, rows)))
    return found


def by_running() -> Points:
    """Microseconds of a decode step, over 16 steps, by requests that run."""
    return [(n, steps(mine := Ours(60_000), mine.running(n, 64, random.Random(0)))) for n in (1, 8, 64, 256, 2048)]


def steps(mine: Ours, rows: Any) -> float:
    """Median over 7 rounds of 16 steps, so that every round opens one block a request."""
    ones = np.ones(len(rows), np.int64)
    rounds = [sum(mine.step(rows, ones) for _ in range(SIZE)) / SIZE for _ in range(8)]
    return statistics.median(rounds[1:]) * 1e6


def by_prompt() -> Points:
    """Microseconds a thousand tokens of admission, by tokens of the prompt."""
    found = []
    for length in (1_000, 10_000, 100_000, 1_000_000):
        taken = []
        for seed in range(5 if length < 1_000_000 else 3):
            mine = Ours(length // SIZE + 10)
            row = mine.manager.begin(np.random.default_rng(seed).integers(0, 32_000, length).tolist())
            started = now()
            mine.prefill(row)
            taken.append(now() - started)
        found.append((length, statistics.median(taken) * 1e9 / length))
    return found


def memory(blocks: int = 1_000_000) -> tuple[float, float]:
    """Bytes a block of a pool in which nothing is cached, and bytes more for each that is."""
    tracemalloc.start()
    mine = Ours(blocks)
    index = mine.manager._prefixes.cache
    empty = tracemalloc.get_traced_memory()[0]
    of_index = index._group.nbytes + 8 * len(index._digest)
    fill(mine, blocks - 1)
    full = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (empty - of_index) / blocks, (full - empty + of_index) / (blocks - 1)


def main() -> None:
    """Print the tables; draw them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="where to draw them (matplotlib)")
    asked = parser.parse_args()
    tables = {
        "us a decode step of 64, by blocks of the pool": by_pool(),
        "us a decode step, by requests that run": by_running(),
        "us of admission a thousand tokens, by tokens of the prompt": by_prompt(),
    }
    for title, points in tables.items():
        print(title)
        for x, y in points:
            print(f"  {x:>9,}  {y:10.1f}")
    pool, cached = memory()
    print(f"bytes a block of 10^6: {pool:.1f}; a cached one {cached:.1f} more, in the index")
    if asked.plot is not None:
        draw(tables, asked.plot)


def draw(tables: dict[str, Points], path: Path) -> None:
    """One picture for each table, both axes logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(5 * len(tables), 4))
    for axis, (title, points) in zip(axes, tables.items(), strict=True):
        axis.loglog([x for x, _ in points], [y for _, y in points], "o-")
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=1)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
