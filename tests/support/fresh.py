"""Scripts pasted into fresh Pythons: each in a process that has imported torch and the kit, and run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# A child that is forked for each script shares what was imported, and nothing that an earlier script did.
_SERVER = """
import json, os, sys, traceback
import kvcore.testing.checks.runner
for text in json.load(sys.stdin):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        try:
            exec(text, {"__name__": "__main__"})
        except BaseException:
            print(traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        print(json.dumps(said.read()), flush=True)
    os.waitpid(child, 0)
"""


def pasted(scripts: Sequence[str], folder: Path) -> list[str]:
    """What each script prints, in a fresh process with `folder` on its path."""
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", _SERVER],
        input=json.dumps(list(scripts)),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
