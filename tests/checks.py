"""Runs every check of `make test`, goes on after a failure, and says where the time went."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def parts(report: Path) -> list[tuple[str, list[str]]]:
    """The checks in order, cheapest first; `report` is where pytest leaves its durations."""
    python = sys.executable
    sphinx = [python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html"]
    # Small chunks: a worker that has the long tests is not given its share of the short ones as well.
    spread = ["-n", "2", "--maxschedchunk=16"]
    slowest = ["--durations=12", "--durations-min=5"]
    return [
        ("ruff check", [str(BIN / "ruff"), "check", "."]),
        ("ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
        ("import-linter", [str(BIN / "lint-imports")]),
        ("mypy", [python, "-m", "mypy", "--strict"]),
        ("docs", sphinx),
        # Last, so that a reader and CI find its closing line where they look for it.
        ("pytest", [python, "-m", "pytest", *spread, *slowest, f"--junitxml={report}"]),
    ]


def seconds_by_file(report: Path) -> dict[str, float]:
    """Seconds of test time for each test file, as posix paths below the repository root."""
    found: dict[str, float] = defaultdict(float)
    if not report.exists():
        return {}
    for case in ElementTree.parse(report).iter("testcase"):
        # With importlib mode the class name is the dotted path of the file (and of a class, if any).
        parts = case.get("classname", "").split(".")
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").exists():
            parts.pop()
        found["/".join(parts) + ".py" if parts else "?"] += float(case.get("time", 0))
    return dict(found)


def shares(by_file: dict[str, float]) -> list[tuple[str, float, float]]:
    """(name, seconds, limit) for each share of tests/shares.toml; a file counts for the first it matches."""
    declared = tomllib.loads((ROOT / "tests" / "shares.toml").read_text())["share"]
    totals = [0.0] * len(declared)
    for name, seconds in by_file.items():
        for i, share in enumerate(declared):
            if any(PurePosixPath(name).match(pattern) for pattern in share["files"]):
                totals[i] += seconds
                break
    return [(s["name"], t, 60.0 * s["minutes"]) for s, t in zip(declared, totals, strict=True)]


def print_times(took: list[tuple[str, float, int]], by_file: dict[str, float], wall: float) -> None:
    """The table at the end: each part, each room's share of the test time, each share against its limit."""
    print("\n-- where the time went", "-" * 50)
    for name, seconds, status in took:
        print(f"{name:<16}{seconds:8.1f} s  {'ok' if status == 0 else f'FAILED (status {status})'}")
    total = sum(by_file.values()) or 1.0
    rooms: dict[str, float] = defaultdict(float)
    for name, seconds in by_file.items():
        rooms["/".join(name.split("/")[:2]) if name.count("/") > 1 else name] += seconds
    for room, seconds in sorted(rooms.items(), key=lambda item: -item[1]):
        print(f"  {room:<20}{seconds:8.1f} s of test time  {seconds / total:6.1%}")
    pytest_wall = sum(seconds for name, seconds, _ in took if name == "pytest")
    for name, seconds, limit in shares(by_file):
        # Test time is summed over the workers; its share of the wall clock is what a limit speaks of.
        mine = pytest_wall * seconds / total
        print(f"share of '{name}': {mine:.0f} s of {limit:.0f} s{'' if mine <= limit else '  OVER ITS LIMIT'}")
    print(f"all checks: {wall:.0f} s")


def main() -> int:
    """Run all parts; 0 when all passed, 1 otherwise."""
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    started, took = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        for name, command in parts(report):
            print(f"\n== {name}", flush=True)
            begun = time.monotonic()
            status = subprocess.run(command, check=False).returncode
            took.append((name, time.monotonic() - begun, status))
        by_file = seconds_by_file(report)
    print_times(took, by_file, time.monotonic() - started)
    failed = [name for name, _, status in took if status]
    if failed:
        print("FAILED:", ", ".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
