"""Start-up times: `import kvcore` and `kvcore --help` against an empty Python, interleaved; medians.

python tests/benchmarks/bench_import.py [rounds]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    'python -c "import kvcore"': [sys.executable, "-c", "import kvcore"],
    "kvcore --help": [str(Path(sys.executable).parent / "kvcore"), "--help"],
}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each command, one of each a round, after a round that only warms the file cache."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if number:
                taken[name].append(time.perf_counter() - begun)
    return taken


def main() -> None:
    """Print a table of medians, and what each costs beyond an empty Python."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    if rounds < 5:
        sys.exit("give at least 5 rounds: a median of fewer says little")
    taken = measure(rounds)
    base = statistics.median(taken["python -c pass"])
    print(f"median of {rounds} interleaved rounds")
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}"
        print(f"{name:<28}{median * 1e3:7.1f} ms  ({spread}), {1e3 * (median - base):+.1f} ms")


if __name__ == "__main__":
    main()
