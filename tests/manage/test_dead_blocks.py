"""The manager tells each death of a block's content once, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.named_manager import NamedManager, ScheduledRequest

from kvcore.errors import OutOfBlocksError
from kvcore.spec.retention import Full, Window


@pytest.mark.parametrize("seed", range(8))
def test_each_death_is_told_once_and_only_deaths(seed, config_of):
    """A random life of a manager: dead blocks are in no table and in no index, and all die in the end."""
    rng = random.Random(seed)
    config = config_of([(Full(), 8), (Window(20), 8)], 40)
    manager = NamedManager(config, track_dead=True)
    dead, running, number = set(range(1, 40)), [], 0
    for _ in range(300):
        number += 1
        if len(running) < 4 or rng.random() < 0.1:
            manager.begin(f"r{number}", [rng.randrange(2) for _ in range(rng.randrange(1, 60))])
            running.append(f"r{number}")
        name = rng.choice(running)
        row = manager.row(name)
        known, admitted = int(manager.requests.known[row]), bool(manager.requests.admitted[row])
        if rng.random() < 0.15 or known > 100:
            manager.free([name])
            running.remove(name)
            continue
        hit = 0 if admitted else manager.lookup([name])[0]
        left = known - manager.num_computed(name) - hit
        count = rng.randint(1, left)
        try:
            step = manager.allocate([ScheduledRequest(name, count)])
        except OutOfBlocksError:
            manager.free([name])
            running.remove(name)
            continue
        for _, block in step.dead:
            assert block not in dead
            dead.add(block)
        for _, block in step.new_blocks:
            assert block in dead
            dead.remove(block)
        held = {b for r in running for g in (0, 1) for b in manager.table(r, g)[1]}
        cached = {block for _, _, block in manager._prefixes.cache.entries()}
        assert not dead & (held | cached)
        manager.commit(step.step, {name: [rng.randrange(2)]} if count == left else {})
        if rng.random() < 0.7:
            manager.retire(step.step)
        if rng.random() < 0.01:
            manager.reset_prefix_cache()
    manager.free(running)
    manager.retire(manager.stats()["steps"])
    manager.reset_prefix_cache()
    dead |= {block for _, block in manager._dead.drain(np.zeros((0, 2), int)).tolist()}
    assert dead == set(range(1, 40))
    manager.check_integrity()


def test_without_tracking_nothing_is_kept(manager_of):
    manager = manager_of(blocks=10)
    manager.begin("a", range(40))
    step = manager.allocate([ScheduledRequest("a", 40)])
    manager.commit(step.step, {})
    manager.retire(step.step)
    manager.free(["a"])
    manager.begin("b", [1])
    assert manager.allocate([ScheduledRequest("b", 1)]).dead == ()
