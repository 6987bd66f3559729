"""Writes the register table of docs/kernels.md; run it after the kernels or the tiles have changed."""

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "backends")]
BEGIN, END = "<!-- registers: begin -->", "<!-- registers: end -->"


def main() -> None:
    import triton
    from backends.triton.proof_set import proof_set, table
    from kvcore_triton.ahead_of_time import compiled

    begun, page = time.monotonic(), ROOT / "docs" / "kernels.md"
    results = {v.name: compiled(v) for v in proof_set()}
    text = page.read_text()
    note = f"Compiled with triton {triton.__version__}, {len(results)} variants.\n\n"
    made = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{note}{table(results)}{END}", text, flags=re.DOTALL)
    page.write_text(made)
    print(f"{len(results)} variants in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
