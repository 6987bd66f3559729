"""Everything about the Triton backend that needs a device, in one script: the kit, and speeds.

    python tests/gpu/run.py --out gpu.json [--minutes 7.5] [--smoke]

Takes under 8 minutes on an H200, uses no network, and needs torch and triton alone; FlashInfer and
flash-attn are measured too where they can be imported. The JSON is written again after every measurement:
what found no time or broke is named in it, never left out silently, and stopping the script loses nothing.
FlashInfer comes last, in a process of its own that is ended when time is up, because it may compile for
minutes. `--smoke` goes through the same motions without a device, to test this script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(ROOT / "plugins")]
LIBRARIES = ("torch", "triton", "flashinfer-python", "flash-attn", "numpy")
# Share of the time that each part may use up to, counted from the start.
UNTIL = {"kit": 0.4, "copy": 0.45, "write": 0.55, "attention": 0.8, "flashinfer": 1.0}
# Cases of the kit between two writings of the document.
CASES_AT_ONCE = 20
Found = dict[str, Any]


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        self.begun, self.limit = time.monotonic(), 60 * minutes

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def left(self, part: str) -> float:
        """Seconds until a part has had its share."""
        return self.limit * UNTIL[part] - self.spent

    def over(self, part: str) -> bool:
        """Whether a part has had its share."""
        return self.left(part) < 0


@dataclass
class Session:
    """One run of this script, and the document that its parts fill as they go."""

    target: Any
    clock: Clock
    smoke: bool
    out: Path
    document: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Write the document; whoever is stopped meanwhile leaves the one before."""
        partial = self.out.with_name(f"{self.out.name}.partial")
        partial.write_text(json.dumps(self.document, indent=1))
        partial.replace(self.out)

    def run(self, name: str, part: Part) -> None:
        """One part; where it breaks, what it found stays, and the other parts still tell something."""
        begun, found = self.clock.spent, self.document.setdefault(name, {})
        try:
            part(self, found)
        except Exception:
            found.setdefault("broken", []).append(broken())
        found["seconds"] = round(self.clock.spent - begun, 1)
        print(f"{name}: {found['seconds']} s", file=sys.stderr, flush=True)
        self.save()


Part = Callable[[Session, Found], None]


def broken(**where: str) -> dict[str, str]:
    """The exception being handled, as the document tells it."""
    error = sys.exception()
    return where | {"reason": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


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
    from kvcore_triton.declaration import TritonBackendSpec, TritonOptions

    from kvcore.attention.declaration import DeviceFacts
    from kvcore.testing.cases.base import here
    from kvcore.testing.cases.planning import Target

    return Target(TritonBackendSpec, TritonOptions(interpret=smoke), DeviceFacts("cpu") if smoke else here())


def run_kit(session: Session, found: Found) -> None:
    """The conformance kit at level full, as far as time allows; quick cases first."""
    from kvcore.testing import run
    from kvcore.testing.checks.runner import selected

    target = session.target
    cases = selected(target.spec, level="full", options=target.options, facts=target.facts)
    cases.sort(key=lambda c: c.tier != "quick")
    if session.smoke:
        cases = [c for c in cases if c.id in ("L1.write.base.mixed", "L2.attend.base.decode")]
    results: list[Any] = []
    for i, case in enumerate(cases):
        found["not_run_for_time"] = len(cases) - i
        if session.clock.over("kit"):
            break
        results += run(target.spec, [case], options=target.options, facts=target.facts, probe_refused=False)
        found["not_run_for_time"] -= 1
        if i % CASES_AT_ONCE == 0 or i + 1 == len(cases):
            found.update(_outcomes(results))
            session.save()
    found.update(_outcomes(results))


def _outcomes(results: Sequence[Any]) -> Found:
    failed = [r for r in results if r.outcome == "failed"]
    return {
        "proof": results[0].proof if results else None,
        "summary": dict(Counter(r.outcome for r in results)),
        "failed": [{"id": r.case.id, "reason": r.reason} for r in failed],
        "worst": [
            {"id": r.case.id, "error": r.error, "tolerance": r.tolerance}
            for r in sorted((r for r in results if r.error), key=lambda r: -r.error / (r.tolerance or 1))[:5]
        ],
    }


def run_copy(session: Session, found: Found) -> None:
    """Device copy bandwidth, and block copy and zero against it."""
    import torch

    from kvcore.memory.kernels import block_copy
    from kvcore.testing.bench.timing import copy_bandwidth, interleaved

    device, smoke = session.target.device, session.smoke
    limit = copy_bandwidth(device, 1 << (22 if smoke else 30))
    found["copy_gb_per_s"] = limit / 1e9
    session.save()
    width, count = 65_536, 16 if smoke else 4096
    arena = torch.zeros(2 * count, width, dtype=torch.int8, device=device).view(1, 1, 2 * count, width)
    order = torch.randperm(count, device=device)
    calls = {
        "copy": lambda: block_copy.copy_blocks(arena, arena, order, order + count, overlap=False),
        "zero": lambda: block_copy.zero_blocks(arena, order),
    }
    seconds = interleaved(calls, 3 if smoke else 15, device)
    moved = {"copy": 2 * width * count, "zero": width * count}
    found["blocks"] = {
        n: {"gb_per_s": moved[n] / t / 1e9, "of_bandwidth": moved[n] / t / limit} for n, t in seconds.items()
    }


def speeds(what: str, *, flashinfer: bool = False) -> Part:
    """Rows of attention, beside FlashInfer or beside the other peers, or rows of cache writes.

    A shape that raises stands under `broken` with the reason; the others are measured all the same.
    """
    part = "flashinfer" if flashinfer else what

    def measure(session: Session, found: Found) -> None:
        from kvcore.testing.bench.peers import FLASHINFER, NAMES, candidates
        from kvcore.testing.bench.rows import attention_rows, large_shapes, table, write_rows
        from kvcore.testing.bench.timing import copy_bandwidth

        target, smoke = session.target, session.smoke
        limit = copy_bandwidth(target.device, 1 << (22 if smoke else 30))
        shapes = [_tiny()] if smoke else list(large_shapes(what, "bfloat16"))
        names = [n for n in NAMES if (n == FLASHINFER) == flashinfer]
        if flashinfer and not smoke:
            shapes = [s for s in shapes if FLASHINFER in candidates(s, target.device)]
        found |= {"rows": [], "broken": [], "not_run_for_time": [str(s) for s in shapes]}
        for shape in shapes:
            if session.clock.over(part):
                break
            rounds = 1 if smoke else 15
            try:
                if what == "attention":
                    found["rows"] += attention_rows(shape, [target], limit, rounds, names)
                else:
                    found["rows"] += write_rows(shape, [target], limit, rounds)
            except Exception:
                found["broken"].append(broken(shape=str(shape)))
            found["not_run_for_time"].remove(str(shape))
            session.save()
        print(table(found["rows"]), file=sys.stderr)

    return measure


def _tiny() -> Any:
    from kvcore.testing.bench.problem import Shape

    return Shape(2, 40, heads=4, kv_heads=2, head_dim=32, dtype="float32")


def run_flashinfer(session: Session, found: Found) -> None:
    """Attention beside FlashInfer, in a process that is ended with its compilers when time is up."""
    import torch

    from kvcore.testing.bench.peers import FLASHINFER, candidates
    from kvcore.testing.bench.rows import large_shapes

    shapes = large_shapes("attention", "bfloat16")
    if not session.smoke and not any(FLASHINFER in candidates(s, session.target.device) for s in shapes):
        found["skipped"] = "FlashInfer is not installed"
        return
    seconds = session.clock.left("flashinfer")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    out = session.out.with_name(f"{session.out.name}.flashinfer")
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(out), "--minutes", str(seconds / 60), "--flashinfer-only"]
    status = within([*command, *(["--smoke"] if session.smoke else [])], seconds)
    if out.exists():
        found |= json.loads(out.read_text())["flashinfer"]
        out.unlink()
    if status is None:
        found["stopped"] = f"no time left after {seconds:.0f} s"
    elif status not in (0, 1):
        found.setdefault("broken", []).append({"reason": f"its process ended with status {status}"})


def within(command: Sequence[str], seconds: float) -> int | None:
    """Exit status of a command; None when it was ended, with all that it had started, after `seconds`."""
    child = subprocess.Popen(command, start_new_session=True)
    try:
        return child.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


PARTS: dict[str, Part] = {
    "kit": run_kit,
    "copy": run_copy,
    "write": speeds("write"),
    "attention": speeds("attention"),
    "flashinfer": run_flashinfer,
}
FLASHINFER_ONLY: dict[str, Part] = {"flashinfer": speeds("attention", flashinfer=True)}


def main() -> int:
    """Run every part; 0 when the kit passed and nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--flashinfer-only", action="store_true", help="the last part alone, in this process")
    asked = parser.parse_args()
    import torch

    if not asked.smoke and not torch.cuda.is_available():
        print("no GPU here: nothing was run (--smoke tests this script without one)", file=sys.stderr)
        return 2
    # Ends FlashInfer's process too, where `timeout` ends this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    session = Session(place_of(asked.smoke), Clock(asked.minutes), asked.smoke, asked.out)
    session.document |= {"smoke": asked.smoke, "environment": environment()}
    for name, part in (FLASHINFER_ONLY if asked.flashinfer_only else PARTS).items():
        session.run(name, part)
    parts = [found for found in session.document.values() if isinstance(found, dict)]
    return int(any(found.get("broken") or found.get("failed") for found in parts))


if __name__ == "__main__":
    sys.exit(main())
