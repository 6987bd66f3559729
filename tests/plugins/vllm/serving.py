"""Runs `generate.py` in the environment with vLLM; plugins that are not installed are put beside it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from support.reference import NEAR_TIE

PYTHON = "KVCORE_TEST_VLLM"
HERE = Path(__file__).parent


def serve(repo: Path, folder: Path, name: str, jobs: list[dict], *plugins: Path) -> list[dict]:
    """Results of some jobs, all in one process; see `generate.py`.

    Args:
        repo: The checkout.
        folder: For the files that go there and come back.
        name: Of these files.
        jobs: What is to be run.
        plugins: Folders with plugins.
    """
    asked, answered, log = (folder / f"{name}.{kind}" for kind in ("jobs.json", "results.json", "log"))
    asked.write_text(json.dumps(jobs))
    paths = [repo, repo / "backends", repo / "plugins", *plugins]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVCORE_"))}
    kept |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    command = [os.environ[PYTHON], str(HERE / "generate.py"), str(asked), str(answered)]
    with log.open("w") as out:
        done = subprocess.run(command, env=kept, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(log.read_text()[-4000:])
    return json.loads(answered.read_text())


def installed(folder: Path, module: str, name: str) -> None:
    """Make a package below `folder` a plugin, as an installation would."""
    record = folder / f"{name}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[kvcore]\n{name} = {module}\n")


def first_difference(mine: list[int], theirs: list[int]) -> int | None:
    """Where two token lists part."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)


def near_tie(own: dict, row: int, at: int) -> bool:
    """Whether vLLM's own two best tokens lie so close that either may win."""
    return own["gaps"][row][at] <= NEAR_TIE
