"""Cases in several processes, each with an instance of the backend of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from kvcore.errors import ConfigError
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CellResult
from kvcore.testing.cases.planning import Target
from kvcore.testing.checks.cell import Cell


class Recipe(NamedTuple):
    """What a process makes its `Cell` from.

    Attributes:
        target: Backend, options and device.
        proof: What a pass proves.
        probe: Whether refused cases are run as well.
    """

    target: Target
    proof: str
    probe: bool


def in_processes(cases: Sequence[Case], recipe: Recipe, jobs: int) -> Iterator[CellResult]:
    """Run cases in `jobs` processes; one that ends takes its own case with it, and no other.

    Yields:
        Results, in the order in which they come.

    Raises:
        ConfigError: Another process cannot import the backend.
    """
    _check_importable(recipe)
    left, suspects = deque(cases), list[Case]()
    while left or suspects:
        if suspects:
            yield _alone(suspects.pop(), recipe)
            continue
        # No more cases than processes at a time: when one ends, few are under suspicion.
        running: dict[Future[CellResult], Case] = {}
        with _pool(recipe, jobs) as pool:
            try:
                while left or running:
                    while left and len(running) < jobs:
                        future = pool.submit(_run, left[0])
                        running[future] = left.popleft()
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        del running[future]
                        yield result
            except BrokenProcessPool:
                suspects = list(running.values())


def _alone(case: Case, recipe: Recipe) -> CellResult:
    """A case in a process that nothing else runs in."""
    with _pool(recipe, 1) as pool:
        try:
            return pool.submit(_run, case).result()
        except BrokenProcessPool:
            reason = "the process that ran it came to an end"
            return CellResult(case, str(recipe.target.spec.name), "failed", recipe.proof, reason)


def _pool(recipe: Recipe, jobs: int) -> ProcessPoolExecutor:
    # Forked children would inherit locks of torch's threads, and no CUDA.
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _open, (recipe, threads))


_cells: list[Cell] = []


def _open(recipe: Recipe, threads: int) -> None:
    torch.set_num_threads(threads)
    _cells[:] = [Cell(*recipe)]


def _run(case: Case) -> CellResult:
    return _cells[0].run(case)


def _check_importable(recipe: Recipe) -> None:
    spec = recipe.target.spec
    try:
        pickle.dumps(recipe)
        reachable = spec.__module__ != "__main__"
    except (pickle.PicklingError, AttributeError, TypeError):
        reachable = False
    if not reachable:
        raise ConfigError(
            f"another process cannot import {spec.__module__}.{spec.__qualname__} and its options",
            field="jobs",
            allowed=1,
            remedy="put them into a module that can be imported, or run with jobs=1",
        )
