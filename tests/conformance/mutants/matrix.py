"""Find out what kills each mutant, and write the pages of the docs that show it.

python tests/conformance/mutants/matrix.py            all of them (an hour on one core)
python tests/conformance/mutants/matrix.py NAME ...   only these mutants anew
python tests/conformance/mutants/matrix.py + NAME ... the same without the axes, which is what takes long
python tests/conformance/mutants/matrix.py -          only the pages
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from conformance.mutants.kills import MATRIX, find, find_levels, recorded
from conformance.mutants.pages import pages
from conformance.mutants.table import MUTANTS


def main(names: list[str]) -> None:
    """Write the matrix, mutant by mutant, and the pages."""
    kills = recorded() if MATRIX.exists() else {}
    search = find_levels if "+" in names else find
    with tempfile.TemporaryDirectory() as folder:
        for mutant in (m for m in MUTANTS if not names or m.name in names):
            kill = kills[mutant.name] = search(mutant, mutant.spec(Path(folder)))
            print(mutant.name, kill["case"], *kill["levels"], *kill.get("axes", ()), flush=True)
            ordered = {m.name: kills[m.name] for m in MUTANTS if m.name in kills}
            MATRIX.write_text(json.dumps(ordered, indent=1) + "\n")
    for path, text in pages(recorded()).items():
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
