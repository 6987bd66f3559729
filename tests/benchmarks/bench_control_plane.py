"""The manager's calls beside those of vLLM's own `KVCacheManager`: CPU time, medians of interleaved rounds.

FOLDER holds the source of vLLM 0.33 (see `vllm_manager.py`); without it only ours is measured. Block size 16, prefix
caching on, sha256. Ours counts allocate, commit and retire; the digests of new blocks are counted on both sides.
`packed` is ours out of large pages, cut as for 10 full and 52 window layers; the other columns are of `slots`.
`bound` is what the same digests, searches, insertions and array writes cost alone; `bounds` is ours over it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bare import RUNNING, SIZE, Bare, chain_of
from vllm_manager import Vllm

from kvcore.manage.manager import KVCacheManager
from kvcore.manage.prefix.block_hash import BlockHasher, token_array
from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import SizedLayout, plain_layout
from kvcore.spec.retention import Full, Retention, Window

CUTS = (26, 5)  # blocks of the full group, and of a window group, in a large page
WARM = 3  # steps of either side that are not counted: memory is touched for the first time
Measured = tuple[int, float]  # operations, seconds
now = time.thread_time  # of this thread alone: whatever else runs on the machine does not count


def tokens(count: int, rng: random.Random) -> list[int]:
    """So many random ids."""
    return [rng.randrange(32_000) for _ in range(count)]


def config_of(groups: int, blocks: int, size: int = SIZE) -> KVCacheConfig:
    """A full group, and windows of 1,024 tokens beside it; under `packed` as many blocks of the smaller cut."""
    content = KVHeads(1, 8)
    layout = SizedLayout(plain_layout(content), size)
    kinds: list[Retention] = [Full(), *[Window(1024)] * (groups - 1)]
    cuts, pages = [CUTS[min(i, 1)] if PACKED else 0 for i in range(groups)], blocks // min(CUTS)
    made = (
        KVCacheGroupSpec(
            i, KVCacheSpec(content, kind), None, (CacheId(i),), layout, size, 1, cut * pages or blocks, cut
        )
        for i, (kind, cut) in enumerate(zip(kinds, cuts, strict=True))
    )
    return (
        KVCacheConfig("packed", 0, tuple(made), (), pages, 1)
        if PACKED
        else KVCacheConfig("slots", blocks, tuple(made), ())
    )


class Ours:
    """Our manager, driven as a scheduler does: one call a step for all requests."""

    def __init__(self, blocks: int, groups: int = 1) -> None:
        self.manager = KVCacheManager(config_of(groups, blocks))

    def prefill(self, row: int) -> int:
        """The whole prompt in one step; returns the hit."""
        hit = self.manager.lookup(row)
        step = self.manager.begin_step()
        step.try_add(row, int(self.manager.requests.known[row]) - hit)
        self.finish(step, np.array([row]))
        return hit

    def running(self, count: int, prompt: int, rng: random.Random) -> Any:
        """Rows of so many requests, each with a prompt of its own and the first token after it."""
        rows = [self.manager.begin(tokens(prompt, rng)) for _ in range(count)]
        for row in rows:
            self.prefill(row)
        return np.array(rows)

    def tell(self, rows: Any, count: int) -> None:
        """So many more tokens of each request are known: what a scheduler with drafts does, outside the clock."""
        r = self.manager.requests
        r.tokens.extend(rows, np.full(len(rows), count), np.full(len(rows) * count, 7))
        r.known[rows] += count
        r.limit[rows] += count

    def step(self, rows: Any, counts: Any) -> float:
        """One step; seconds of its calls."""
        started = now()
        step = self.manager.begin_step()
        step.add(rows, counts)
        self.finish(step, rows)
        return now() - started

    def finish(self, step: Any, rows: Any) -> None:
        """Allocate, compute, commit and retire a step in which each of these rows gets a token."""
        given = self.manager.allocate(step)
        self.manager.commit(given.step, rows, np.full(len(rows), 7))
        self.manager.retire(given.step)


# ---- the cases: ours, theirs, and the bound where there is one


def allocate(groups: int) -> dict[str, Callable[[], Measured]]:
    """One block a step for 256 requests."""
    steps = 20

    def ours() -> Measured:
        mine = Ours(400_000, groups)
        rows = mine.running(RUNNING, 512, random.Random(0))
        spent = 0.0
        for i in range(WARM + steps):
            mine.tell(rows, SIZE - 1)
            taken = mine.step(rows, np.full(RUNNING, SIZE))
            spent += taken * (i >= WARM)
        return steps * RUNNING, spent

    def theirs() -> Measured:
        peer, rng = Vllm(VLLM, 400_000, groups), random.Random(0)
        requests = [peer.begin(tokens(512, rng)) for _ in range(RUNNING)]
        for request in requests:
            peer.prefill(request)
        return steps * RUNNING, sum([peer.grow(requests, [7] * SIZE) for _ in range(WARM + steps)][WARM:])

    def bound() -> Measured:
        bare = Bare(groups)
        started = now()
        for _ in range(steps):
            bare.blocks()
        return steps * RUNNING, now() - started

    return {"ours": ours, "vllm": theirs, "bound": bound}


def decode(groups: int) -> dict[str, Callable[[], Measured]]:
    """One token a step for 256 requests, 64 steps: each opens four blocks."""
    steps = 64

    def ours() -> Measured:
        mine = Ours(400_000, groups)
        rows, ones = mine.running(RUNNING, 512, random.Random(0)), np.ones(RUNNING, np.int64)
        return steps * RUNNING, sum([mine.step(rows, ones) for _ in range(SIZE + steps)][SIZE:])

    def theirs() -> Measured:
        peer, rng = Vllm(VLLM, 400_000, groups), random.Random(0)
        requests = [peer.begin(tokens(512, rng)) for _ in range(RUNNING)]
        for request in requests:
            peer.prefill(request)
        return steps * RUNNING, sum([peer.grow(requests, [7]) for _ in range(SIZE + steps)][SIZE:])

    def bound() -> Measured:
        bare = Bare(groups)
        started = now()
        for i in range(steps):
            bare.decode()
            if i % SIZE == 0:
                bare.blocks()
        return steps * RUNNING, now() - started

    return {"ours": ours, "vllm": theirs, "bound": bound}


def free(groups: int, *, one_by_one: bool = False) -> dict[str, Callable[[], Measured]]:
    """Requests of 2,048 tokens are freed."""

    def ours() -> Measured:
        mine = Ours(400_000, groups)
        rows = mine.running(RUNNING, 2048, random.Random(0))
        started = now()
        if one_by_one:
            for row in rows.tolist():
                mine.manager.free([row])
        else:
            mine.manager.free(rows)
        return RUNNING, now() - started

    def theirs() -> Measured:
        peer, rng = Vllm(VLLM, 400_000, groups), random.Random(0)
        requests = [peer.begin(tokens(2048, rng)) for _ in range(RUNNING)]
        for request in requests:
            peer.prefill(request)
        started = now()
        for request in requests:
            peer.manager.free(request)
        return RUNNING, now() - started

    def bound() -> Measured:
        bare, each = Bare(groups), 2048 // SIZE * groups
        ids = np.arange(RUNNING * each)
        started = now()
        if one_by_one:
            for first in range(0, len(ids), each):
                bare.free(ids[first : first + each])
        else:
            bare.free(ids)
        return RUNNING, now() - started

    return {"ours": ours, "vllm": theirs, "bound": bound}


def lookup(groups: int) -> dict[str, Callable[[], Measured]]:
    """A prompt of 8,192 tokens is cached; its digests are known, the cache has changed since the last search."""

    def ours() -> Measured:
        mine, rng = Ours(100_000, groups), random.Random(0)
        prompt = tokens(8192, rng)
        first = mine.manager.begin(prompt)
        mine.prefill(first)
        mine.manager.free([first])
        row, prefixes = mine.manager.begin(prompt), mine.manager._prefixes
        require(mine.manager.lookup(row) == 8176)  # makes the digests
        started = now()
        for _ in range(100):
            prefixes._version += 1  # as any commit does: what was found before counts no more
            hit = mine.manager.lookup(row)
        spent = now() - started
        require(hit == 8176)
        return 100, spent

    def theirs() -> Measured:
        peer, rng = Vllm(VLLM, 100_000, groups), random.Random(0)
        prompt = tokens(8192, rng)
        first = peer.begin(prompt)
        peer.prefill(first)
        peer.manager.free(first)
        again = peer.begin(prompt)
        started = now()
        for _ in range(100):
            _, hit, _ = peer.manager.get_computed_blocks(again)
        spent = now() - started
        require(hit == 8176)
        return 100, spent

    def bound() -> Measured:
        digests = chain_of(tokens(8192, random.Random(0)))
        index = {digest: block for block, digest in enumerate(digests)}
        started = now()
        for _ in range(100):
            found = list(map(index.get, digests[:511]))
        spent = now() - started
        require(found == list(range(511)))
        return 100, spent

    return {"ours": ours, "vllm": theirs, "bound": bound}


def digests() -> dict[str, Callable[[], Measured]]:
    """From a list of 8,192 ids to its 512 digests."""
    prompt = tokens(8192, random.Random(1))

    def ours() -> Measured:
        hasher = BlockHasher(SIZE)
        started = now()
        for _ in range(20):
            hasher.extend([hasher.chain("")], [512], token_array(prompt).tobytes())
        return 20, now() - started

    def theirs() -> Measured:
        peer = Vllm(VLLM, 100)
        started = now()
        for _ in range(20):
            peer.begin(prompt)
        return 20, now() - started

    return {"ours": ours, "vllm": theirs}


def life(groups: int) -> dict[str, Callable[[], Measured]]:
    """1,000 requests of a shared prefix of 2,048 tokens, 128 of their own and 64 new ones; 64 run at once."""

    def prompts() -> list[list[int]]:
        rng = random.Random(0)
        shared = tokens(2048, rng)
        return [shared + tokens(128, rng) for _ in range(1000)]

    def ours() -> Measured:
        mine, waiting, hits = Ours(60_000, groups), prompts(), 0
        manager, running, born = mine.manager, np.zeros(0, np.int64), np.zeros(0, np.int64)
        steps, started = 0, now()
        while waiting or len(running):
            step = manager.begin_step()
            if len(running):
                step.add(running, np.ones(len(running), np.int64))
            new = []
            # All in one step, as a scheduler does it; who begins like one that is just computed waits for that step.
            while waiting and len(running) + len(new) < (64 if steps else 1):
                row = manager.begin(waiting.pop())
                hit = manager.lookup(row)
                step.try_add(row, int(manager.requests.known[row]) - hit)
                new.append(row)
                hits += hit
            running, born = np.append(running, new).astype(np.int64), np.append(born, [steps] * len(new))
            mine.finish(step, running)
            steps += 1
            done = steps - born >= 64
            if done.any():
                manager.free(running[done])
                running, born = running[~done], born[~done]
        require(hits >= 999 * 2048)
        return 1000, now() - started

    def theirs() -> Measured:
        peer, waiting, hits = Vllm(VLLM, 60_000, groups), prompts(), 0
        running: list[Any] = []
        started = now()
        while waiting or running:
            while waiting and len(running) < 64:
                request = peer.begin(waiting.pop())
                hits += peer.prefill(request)
                running.append(request)
            peer.grow(running, [11])
            for request in [r for r in running if r.num_output_tokens >= 64]:
                running.remove(request)
                peer.manager.free(request)
        require(hits >= 999 * 2048)
        return 1000, now() - started

    def bound() -> Measured:
        bare, waiting = Bare(), prompts()
        started = now()
        for prompt in waiting:
            bare.life(prompt)
        return 1000, now() - started

    return {"ours": ours, "vllm": theirs, "bound": bound}


CASES: dict[str, tuple[Callable[[], dict[str, Callable[[], Measured]]], float]] = {
    "allocate a block, 1 group": (lambda: allocate(1), 20),
    "allocate a block, 1 full + 3 windows": (lambda: allocate(4), 15),
    "decode a token, 1 group": (lambda: decode(1), 30),
    "decode a token, 1 full + 3 windows": (lambda: decode(4), 20),
    "lookup of 8k, 1 group": (lambda: lookup(1), 12),
    "hash of 8k": (digests, 3.5),
    "free 2k, 256 in a call": (lambda: free(1), 5),
    "free 2k, one by one": (lambda: free(1, one_by_one=True), 0),
    "free 2k, 1 full + 3 windows": (lambda: free(4), 0),
    "life": (lambda: life(1), 6),
}


def require(good: bool) -> None:
    """Both sides must do the work that is timed."""
    if not good:
        sys.exit("a side did not find what it had to")


def timed(run: Callable[[], Measured], *, packed: bool = False) -> float:
    """Microseconds an operation, the garbage collector off."""
    global PACKED
    PACKED = packed
    gc.collect()
    gc.disable()
    try:
        count, seconds = run()
    finally:
        gc.enable()
    return seconds / count * 1e6


def main() -> None:
    """Run the sides of each case in turn; print medians and ratios."""
    global VLLM
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="source of vLLM 0.33")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases with this word")
    asked = parser.parse_args()
    if asked.rounds < 5:
        sys.exit("give at least 5 rounds: a median of fewer says little")
    columns = f"{'ours':>9} {'vLLM':>9} {'ratio':>7} {'wanted':>7} {'bound':>8} {'bounds':>7} {'packed':>8}"
    print(f"{'us an operation':38} {columns}")
    for name, (make, wanted) in CASES.items():
        if asked.only not in name:
            continue
        VLLM = asked.vllm
        sides = {side: run for side, run in make().items() if side != "vllm" or asked.vllm}
        taken: dict[str, list[float]] = {side: [] for side in sides}
        packed: list[float] = []
        for _ in range(asked.rounds):
            for side, run in sides.items():
                taken[side].append(timed(run))
            packed.append(timed(sides["ours"], packed=True))
        middle = {side: statistics.median(times) for side, times in taken.items()}
        ratio = f"{middle['vllm'] / middle['ours']:7.1f}" if "vllm" in middle else " " * 7
        told = " ".join(f"{middle[s]:9.3f}" if s in middle else " " * 9 for s in ("ours", "vllm"))
        limit = f"{middle['bound']:8.3f} {middle['ours'] / middle['bound']:7.1f}" if "bound" in middle else " " * 16
        print(f"{name:38} {told} {ratio} {wanted or '':>7} {limit} {statistics.median(packed):8.3f}", flush=True)


VLLM: Any = None
PACKED = False

if __name__ == "__main__":
    main()
