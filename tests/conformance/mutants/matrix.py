"""The kill matrix: which case and which levels kill each mutant; the page of the docs that shows it.

python tests/conformance/mutants/matrix.py            write the matrix and docs/mutants.md (10 minutes)
python tests/conformance/mutants/matrix.py NAME ...   only these mutants anew
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from conformance.mutants.mutant import Mutant, catalogue
from conformance.mutants.table import MUTANTS

from kvcore.attention.declaration import BackendSpec
from kvcore.testing import Case, run
from kvcore.testing.cases.case import LEVELS

ROOT = Path(__file__).parents[3]
MATRIX = Path(__file__).with_name("kill_matrix.json")
PAGE = ROOT / "docs" / "mutants.md"
COMMAND = "python tests/conformance/mutants/matrix.py"
# What each report is about, as far as a backend is at fault.
REPORTS = {
    "A17": "any block size declared, small ones do not compile",
    "A18": "any block size declared, kernels of some missing",
    "A20": "wrong block size or table given or read, NaN from stale bytes",
    "A21": "stale bits read as NaN, 0 * NaN",
    "A25": "values outside the window not masked",
    "A26": "a feature accepted and ignored",
    "A27": "capabilities declared that are not there",
    "A29": "ALiBi crashes in one version of the kernel",
    "A30": "soft-cap accepted, not implemented",
    "A32": "queries quantized too, scales of 1 by default",
    "A33": "strides of the scale view worked out from its shape",
    "A35": "offsets beyond 2^31 in int32",
    "A36": "log-sum-exp in another convention",
    "A38": "bytes written in another layout than declared",
}


class Kill(TypedDict):
    """What kills a mutant: the first case of its own level, and every level with a quick case that does."""

    case: str
    levels: list[str]


def first_kill(mutant: Mutant, spec: type[BackendSpec]) -> tuple[str, str]:
    """Id of the first selected case that fails, and the reason; empty when all pass."""
    results = run(spec, mutant.selected(), stop_at_first=True)
    return next(((r.case.id, r.reason or "") for r in results if r.outcome == "failed"), ("", ""))


def killing_levels(
    spec: type[BackendSpec],
    tier: str = "full",
    levels: tuple[str, ...] = LEVELS,
    pick: Callable[[Sequence[Case]], Sequence[Case]] = list,
) -> list[str]:
    """The levels in which some case fails; each stops at its first.

    Args:
        spec: The mutant.
        tier: ``quick`` leaves out the cases of level full.
        levels: Which levels to try.
        pick: Which of their cases.
    """
    found = []
    for level in levels:
        cases = [c for c in catalogue() if c.level == level and (tier == "full" or c.tier == "quick")]
        if any(r.outcome == "failed" for r in run(spec, pick(cases), stop_at_first=True, probe_refused=False)):
            found.append(level)
    return found


def recorded() -> dict[str, Kill]:
    """The matrix as it was last written."""
    found: dict[str, Kill] = json.loads(MATRIX.read_text())
    return found


def page(kills: dict[str, Kill]) -> str:
    """docs/mutants.md."""
    reports = ", ".join(f"{name} ({what})" for name, what in REPORTS.items())
    lines = [
        "# Mutants: does the kit kill what is broken?",
        "",
        f"<!-- written by `{COMMAND}`; do not edit -->",
        "",
        f"{len(MUTANTS)} broken backends. Each is one of two right ones with one line made wrong, no two at one line:",
        "the dense reference backend of `tests/conformance/mutants/victim/`, or the one of `partitioned/`, which pads",
        "sequences into batches, cuts keys into partitions and packs them by vectors. The unbroken ones fail none.",
        "Where a fault begins at a size, no case of level quick below it notices; the long run shows that.",
        "",
        "`make test` proves that the case named here kills each of them, and `make test-long` runs all quick cases on",
        "each to see which levels do. Where one level alone kills a mutant, a kit without that level would call it",
        "right; for one of each level, `make test` proves it afresh, and the long run with the cases of level full as",
        "well.",
        "",
        f"Field reports that the mutants stand for: {reports}.",
        "",
    ]
    for level in LEVELS:
        mine = [m for m in MUTANTS if m.level == level]
        lines += [f"## {level}", "", "| mutant | broken | from | stands for | killed by | levels that kill it |"]
        lines += ["|---|---|---|---|---|---|"]
        for m in mine:
            kill = kills[m.name]
            lines.append(
                f"| {m.name} | {m.broken} | {_size(m)} | {' '.join(m.reports) or '-'} | `{kill['case']}` "
                f"| {' '.join(kill['levels'])} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _size(mutant: Mutant) -> str:
    return "-" if mutant.past is None else f"{mutant.past[0]} {mutant.past[1]}"


def main(names: list[str]) -> None:
    """Write the matrix and the page."""
    kills = recorded() if MATRIX.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for mutant in MUTANTS:
            if not names or mutant.name in names:
                spec = mutant.spec(Path(folder))
                case, others = first_kill(mutant, spec)[0], tuple(n for n in LEVELS if n != mutant.level)
                levels = killing_levels(spec, "quick", others) + [mutant.level] * bool(case)
                kill = kills[mutant.name] = Kill(case=case, levels=sorted(levels))
                print(mutant.name, kill["case"], *kill["levels"], flush=True)
    kills = {m.name: kills[m.name] for m in MUTANTS if m.name in kills}
    MATRIX.write_text(json.dumps(kills, indent=1) + "\n")
    PAGE.write_text(page(kills))


if __name__ == "__main__":
    main(sys.argv[1:])
