"""Everything about the Triton backend that needs a device, in one script: the kit, and speeds.

    python tests/gpu/run.py --out gpu.json [--minutes 7.5] [--smoke]

Takes under 8 minutes on an H200, uses no network, and needs torch and triton alone; FlashInfer and
flash-attn are measured too where they can be imported. Parts that find no time are named in the JSON, never
left out silently. `--smoke` goes through the same motions without a device, to test this script.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(ROOT / "plugins")]
LIBRARIES = ("torch", "triton", "flashinfer-python", "flash-attn", "numpy")
# Share of the time that each part may use up to, counted from the start.
UNTIL = {"kit": 0.45, "copy": 0.5, "write": 0.6, "attention": 1.0}


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        self.begun, self.limit = time.monotonic(), 60 * minutes

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def over(self, part: str) -> bool:
        """Whether a part has had its share."""
        return self.spent > self.limit * UNTIL[part]


def environment() -> dict[str, Any]:
    """What ran this."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["device"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return found


def place_of(smoke: bool) -> Any:
    """The Triton backend on the device, or interpreted for a smoke test."""
    from kvcore_triton.spec import TritonBackendSpec, TritonOptions

    from kvcore.testing.base import here
    from kvcore.testing.planning import Place

    return Place(TritonBackendSpec, TritonOptions(interpret=smoke), here())


def run_kit(place: Any, clock: Clock, smoke: bool) -> dict[str, Any]:
    """The conformance kit at level full, as far as time allows; quick cases first."""
    from kvcore.testing import run
    from kvcore.testing.runner import selected

    cases = selected(place.spec, level="full", options=place.options, facts=place.facts)
    cases.sort(key=lambda c: c.tier != "quick")
    if smoke:
        cases = [c for c in cases if c.id in ("L1.write.base.mixed", "L2.attend.base.decode")]
    results, left = [], 0
    for case in cases:
        if clock.over("kit"):
            left += 1
            continue
        results += run(place.spec, [case], options=place.options, facts=place.facts, probe_refused=False)
    failed = [r for r in results if r.outcome == "failed"]
    return {
        "rung": results[0].rung if results else None,
        "summary": dict(Counter(r.outcome for r in results)),
        "not_run_for_time": left,
        "failed": [{"id": r.case.id, "reason": r.reason} for r in failed],
        "worst": [
            {"id": r.case.id, "error": r.error, "tolerance": r.tolerance}
            for r in sorted((r for r in results if r.error), key=lambda r: -r.error / (r.tolerance or 1))[:5]
        ],
    }


def run_copy(place: Any, clock: Clock, smoke: bool) -> dict[str, Any]:
    """Device copy bandwidth, and block copy and zero against it."""
    import torch

    from kvcore.memory.kernels import block_copy
    from kvcore.testing.bench.timing import copy_bandwidth, interleaved

    limit = copy_bandwidth(place.device, 1 << (22 if smoke else 30))
    width, count = 65_536, 16 if smoke else 4096
    arena = torch.zeros(2 * count, width, dtype=torch.int8, device=place.device).view(1, 1, 2 * count, width)
    order = torch.randperm(count, device=place.device)
    calls = {
        "copy": lambda: block_copy.copy_blocks(arena, arena, order, order + count, overlap=False),
        "zero": lambda: block_copy.zero_blocks(arena, order),
    }
    seconds = interleaved(calls, 3 if smoke else 15, place.device)
    moved = {"copy": 2 * width * count, "zero": width * count}
    return {
        "copy_gb_per_s": limit / 1e9,
        "blocks": {n: {"gb_per_s": moved[n] / t / 1e9, "of_bandwidth": moved[n] / t / limit}
                   for n, t in seconds.items()},
    }  # fmt: skip


def speeds(what: str) -> Callable[[Any, Clock, bool], dict[str, Any]]:
    """Rows of attention or of cache writes."""

    def measure(place: Any, clock: Clock, smoke: bool) -> dict[str, Any]:
        from kvcore.testing.bench.problem import Shape
        from kvcore.testing.bench.rows import attention_row, large_shapes, table, write_row
        from kvcore.testing.bench.timing import copy_bandwidth

        limit = copy_bandwidth(place.device, 1 << (22 if smoke else 30))
        tiny = Shape(2, 40, heads=4, kv_heads=2, head_dim=32, dtype="float32")
        shapes = [tiny] if smoke else list(large_shapes(what, "bfloat16"))
        rows, left = [], []
        for shape in shapes:
            if clock.over(what):
                left.append(str(shape))
                continue
            one = attention_row if what == "attention" else write_row
            rows.append(one(shape, place, limit, 1 if smoke else 15))
        print(table(rows), file=sys.stderr)
        return {"rows": rows, "not_run_for_time": left}

    return measure


PARTS: dict[str, Callable[[Any, Clock, bool], dict[str, Any]]] = {
    "kit": run_kit, "copy": run_copy, "write": speeds("write"), "attention": speeds("attention"),
}  # fmt: skip


def main() -> int:
    """Run every part; 0 when the kit passed and nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    import torch

    if not asked.smoke and not torch.cuda.is_available():
        print("no GPU here: nothing was run (--smoke tests this script without one)", file=sys.stderr)
        return 2
    clock = Clock(asked.minutes)
    document: dict[str, Any] = {"smoke": asked.smoke, "environment": environment()}
    place, broken = place_of(asked.smoke), False
    for name, part in PARTS.items():
        begun = clock.spent
        try:
            document[name] = part(place, clock, asked.smoke)
        except Exception:
            # The other parts still tell something; the whole trace goes into the document.
            document[name], broken = {"broken": traceback.format_exc()}, True
        document[name]["seconds"] = round(clock.spent - begun, 1)
        print(f"{name}: {document[name]['seconds']} s", file=sys.stderr, flush=True)
        asked.out.write_text(json.dumps(document, indent=1))
    return int(broken or bool(document["kit"].get("failed")))


if __name__ == "__main__":
    sys.exit(main())
