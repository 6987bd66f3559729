"""Planning from a config.json: seconds of the work itself, of the whole command, and against an empty Python; medians.

python tests/benchmarks/bench_plan.py [rounds]
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kvcore.cli.commands import command
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.engine.planning import prepare_plan
from kvcore.errors import KVCoreError
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, plan
from kvcore.registry.loader import installed
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.retention import Full, Window

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "hf_configs").glob("*.json"))
KVCORE = str(Path(sys.executable).parent / "kvcore")


def planning(file: Path) -> float:
    """Seconds from the composed configuration to the plan."""
    composed = compose([f"model.path='{file}'", "device=h200-141gb"], installed(), command("plan").root)
    begun = time.perf_counter()
    with contextlib.suppress(KVCoreError):  # refused by name: what it took until then
        prepare_plan(build(composed, installed(), purpose="plan").settings, installed(), purpose="plan")
    return time.perf_counter() - begun


def layers(count: int) -> float:
    """Seconds for a model of so many layers, one in six full."""
    content = KVHeads(8, 128, dtype="bfloat16")
    caches = {CacheId(i): KVCacheSpec(content, Window(1024) if i % 6 else Full()) for i in range(count)}
    begun = time.perf_counter()
    plan(caches, {}, Budget(memory=64 << 30), Limits(8192))
    return time.perf_counter() - begun


def whole(*words: str) -> float:
    """Seconds of a command."""
    begun = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - begun


def main() -> None:
    """Print medians: of planning, its slowest config first, and of whole commands, interleaved with an empty Python."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    if rounds < 5:
        sys.exit("give at least 5 rounds: a median of fewer says little")
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for file in CONFIGS:
            seconds = planning(file)
            if number:
                taken.setdefault(file.name.removesuffix("_config.json"), []).append(seconds)
        if number:
            taken.setdefault("10,000 layers", []).append(layers(10_000))
    medians = sorted(((statistics.median(s), name) for name, s in taken.items()), reverse=True)
    print(f"planning, median of {rounds} rounds, the slowest of {len(medians)}")
    for seconds, name in medians[:6]:
        print(f"{seconds * 1e3:8.0f} ms  {name}")
    pairs = [
        (whole(sys.executable, "-c", "pass"), whole(KVCORE, "plan", f"model.path='{CONFIGS[-1]}'", "device=h200-141gb"))
        for _ in range(rounds)
    ]
    empty, command_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"whole command: {command_seconds * 1e3:.0f} ms, an empty Python {empty * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
