"""Planning from a config.json: CPU and wall time of the work itself, of the whole command, and of an empty Python.

Medians; on a machine with nothing else to do both times are the same, on a busy one the first says more.

python tests/benchmarks/bench_plan.py [rounds]
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvcore.cli.commands import command
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.engine.planning import prepare_plan
from kvcore.errors import KVCoreError
from kvcore.plan import rulers
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, plan
from kvcore.registry.loader import installed
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.retention import Full, Window

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "hf_configs").glob("*.json"))
KVCORE = str(Path(sys.executable).parent / "kvcore")


class Took(NamedTuple):
    """Seconds."""

    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{self.cpu * 1e3:6.0f} ms of CPU {self.wall * 1e3:6.0f} ms of wall time"


def now(who: int = resource.RUSAGE_SELF) -> Took:
    """CPU time of this process, or of its children, and the clock."""
    used = resource.getrusage(who)
    return Took(used.ru_utime + used.ru_stime, time.perf_counter())


def since(begun: Took, who: int = resource.RUSAGE_SELF) -> Took:
    """What has been taken since `begun`."""
    return Took(*(b - a for a, b in zip(begun, now(who), strict=True)))


def median(found: Iterable[Took]) -> Took:
    """Of each time by itself."""
    return Took(*(statistics.median(column) for column in zip(*found, strict=True)))


def planning(file: Path) -> Took:
    """From the composed configuration to the plan."""
    composed = compose([f"model.path='{file}'", "device=h200-141gb"], installed(), command("plan").root)
    rulers._rulers.cache_clear()  # a command finds nothing in it
    begun = now()
    with contextlib.suppress(KVCoreError):  # refused by name: what it took until then
        prepare_plan(build(composed, installed(), purpose="plan").settings, installed(), purpose="plan")
    return since(begun)


def layers(count: int) -> Took:
    """A model of so many layers, one in six full."""
    content = KVHeads(8, 128, dtype="bfloat16")
    caches = {CacheId(i): KVCacheSpec(content, Window(1024) if i % 6 else Full()) for i in range(count)}
    begun = now()
    plan(caches, {}, Budget(memory=64 << 30), Limits(8192))
    return since(begun)


def whole(*words: str) -> Took:
    """A command."""
    begun = now(resource.RUSAGE_CHILDREN)
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return since(begun, resource.RUSAGE_CHILDREN)


def main() -> None:
    """Print the slowest configs first, 10,000 layers, and whole commands, interleaved with an empty Python."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    if rounds < 5:
        sys.exit("give at least 5 rounds: a median of fewer says little")
    print(f"medians of {rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    for file in CONFIGS:  # what is loaded late is loaded now
        planning(file)
    taken: dict[str, list[Took]] = {}
    for _ in range(rounds):
        for file in CONFIGS:
            taken.setdefault(file.name.removesuffix("_config.json"), []).append(planning(file))
    slowest = sorted(((median(found), name) for name, found in taken.items()), reverse=True)
    for seconds, name in slowest[:6]:
        print(f"{seconds}  {name}")
    print(f"{median(layers(10_000) for _ in range(rounds))}  10,000 layers")
    commands = {
        "an empty Python": (sys.executable, "-c", "pass"),
        "kvcore plan": (KVCORE, "plan", f"model.path='{CONFIGS[-1]}'", "device=h200-141gb"),
        "kvcore plan of the slowest": (
            KVCORE,
            "plan",
            f"model.path='{CONFIGS[0].parent / slowest[0][1]}_config.json'",
            "device=h200-141gb",
        ),
    }
    times = [[whole(*words) for words in commands.values()] for _ in range(rounds)]
    for name, column in zip(commands, zip(*times, strict=True), strict=True):
        print(f"{median(column)}  {name}")


if __name__ == "__main__":
    main()
