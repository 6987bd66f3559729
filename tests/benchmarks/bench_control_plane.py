"""The manager's calls beside those of vLLM's own `KVCacheManager`: CPU time, medians of interleaved rounds.

python tests/benchmarks/bench_control_plane.py [--vllm FOLDER] [--rounds N] [--json FILE] [--only WORD]

FOLDER holds the source of vLLM 0.33 (no GPU and no compiled code is needed); without it only ours is measured. Block
size 16, prefix caching on, sha256. Ours counts allocate, commit and retire; the digests of new blocks are counted on
both sides where blocks fill. `bound` is what the same digests, insertions and array writes cost alone.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "manage"))
from conftest import make_config

from kvcore.manage.manager import KVCacheManager
from kvcore.spec.retention import Full, Window

SIZE, WINDOW, VOCABULARY = 16, 1024, 32000
Case = Callable[[], tuple[int, float]]  # (operations, seconds)
now = time.perf_counter


def tokens(count: int, rng: random.Random) -> list[int]:
    """So many random ids."""
    return [rng.randrange(VOCABULARY) for _ in range(count)]


class Ours:
    """Our manager, driven as a scheduler does: one call a step for all requests."""

    name = "kvcore"

    def __init__(self, blocks: int, groups: int) -> None:
        shape = [(Full(), SIZE), *[(Window(WINDOW), SIZE)] * (groups - 1)]
        self.manager = KVCacheManager(make_config(shape, blocks))

    def begin(self, prompt: list[int]) -> int:
        return self.manager.begin(prompt)

    def prefill(self, row: int, length: int) -> int:
        hit = self.manager.lookup(row)
        step = self.manager.begin_step()
        step.try_add(row, length - hit)
        self.finish(step, np.array([row]), np.array([7]))
        return hit

    def finish(self, step, rows, sampled) -> None:
        given = self.manager.allocate(step)
        self.manager.commit(given.step, rows, sampled)
        self.manager.retire(given.step)

    def decode(self, rows, ones, sampled) -> None:
        step = self.manager.begin_step()
        step.add(rows, ones)
        self.finish(step, rows, sampled)


def ours_decode(
    running: int, steps: int, groups: int, *, blocks: int = 400_000, prompt: int = 512
) -> tuple[int, float]:
    """`steps` steps of one token each."""
    rng, ours = random.Random(0), Ours(blocks, groups)
    rows = np.array([ours.begin(tokens(prompt, rng)) for _ in range(running)])
    for row in rows.tolist():
        ours.prefill(row, prompt)
    ones, sampled = np.ones(running, np.int64), np.full(running, 7)
    started = now()
    for _ in range(steps):
        ours.decode(rows, ones, sampled)
    return steps * running, now() - started


def ours_allocate(groups: int) -> tuple[int, float]:
    """Twenty steps in which each of 256 requests computes a block of known tokens."""
    rng, ours, steps = random.Random(0), Ours(400_000, groups), 20
    rows = np.array([ours.begin(tokens(512 + steps * SIZE, rng)) for _ in range(256)])
    for row in rows.tolist():
        ours.prefill_part = ours.manager.begin_step()
        ours.prefill_part.try_add(row, 512)
        given = ours.manager.allocate(ours.prefill_part)
        ours.manager.commit(given.step)
        ours.manager.retire(given.step)
    # The digests of the prompt were not asked for by a lookup of the whole: drop those beyond what is computed.
    sizes, spent = np.full(256, SIZE), 0.0
    for i in range(steps):
        last = i == steps - 1
        started = now()
        step = ours.manager.begin_step()
        step.add(rows, sizes)
        given = ours.manager.allocate(step)
        ours.manager.commit(given.step, *((rows, np.full(256, 7)) if last else ()))
        ours.manager.retire(given.step)
        spent += now() - started
    return steps * 256, spent


def main() -> None:
    pass


if __name__ == "__main__":
    for g in (1, 4):
        for f in (lambda: ours_decode(256, 64, g), lambda: ours_allocate(g)):
            print(g, min(t / n * 1e6 for n, t in (f() for _ in range(3))))
    n, t = ours_decode(8, 64, 1)
    print("8:", t / 64 * 1e6)
    n, t = ours_decode(1, 64, 1)
    print("1:", t / 64 * 1e6)
