"""What the plan promised can be scheduled: capacity and the manager use the same bounds (A1)."""

from __future__ import annotations

import random
import subprocess
import sys

from support.named_manager import NamedManager, ScheduledRequest

from kvcore.plan.capacity import Capacity, Limits
from kvcore.spec.retention import Chunk, Full, Window


def serve_alone(manager: NamedManager, name: str, length: int, step: int) -> None:
    """Prefill all but a few tokens in steps of `step`, decode the rest; every step must find its blocks."""
    prompt = max(1, length - 3)
    manager.begin(name, [0] * prompt)
    done = 0
    while done < length:
        (hit,) = manager.lookup([name]) if not done else (0,)
        scheduled = min(step, prompt - done - hit) if done + hit < prompt else 1
        given = manager.allocate([ScheduledRequest(name, scheduled)])
        done += hit + scheduled
        manager.commit(given.step, {name: [1]} if done >= prompt else {})
        manager.retire(given.step)
    manager.check_integrity()
    manager.free([name])


def test_what_fits_at_start_up_can_be_scheduled(config_of):
    rng = random.Random(7)
    kinds = [Full, lambda: Window(rng.randint(1, 40)), lambda: Chunk(rng.randint(1, 40))]
    served = 0
    for _ in range(150):
        groups = [(rng.choice(kinds)(), rng.choice((1, 2, 3, 8, 16))) for _ in range(rng.randint(1, 4))]
        config = config_of(groups, rng.randint(2, 60))
        limits = Limits(max_model_len=200, max_num_batched_tokens=rng.choice((1, 3, 16, 64)))
        length = min(Capacity(config, limits).longest(), 200)
        if length:
            served += 1
            manager = NamedManager(config)
            for i in range(3):  # the second and third also hit the first's prefix
                serve_alone(manager, f"r{i}", length, limits.max_num_batched_tokens)
            assert manager.stats()["peak_blocks"] <= Capacity(config, limits).needed_units(length)
    assert served > 100


def test_whole_sequences_at_once_as_planned(config_of):
    """`simultaneous` sequences of equal length, each step shared by all: no step ever lacks a block."""
    rng = random.Random(3)
    for _ in range(40):
        groups = [(Full(), 16), (Window(rng.randint(2, 60)), rng.choice((8, 16)))]
        config = config_of(groups, rng.randint(40, 120))
        limits = Limits(max_model_len=100, max_num_batched_tokens=32)
        count = Capacity(config, limits).simultaneous(100)
        manager = NamedManager(config)
        left = {f"r{i}": 100 for i in range(count)}
        for i, name in enumerate(left):
            manager.begin(name, [i] * 100)
        while any(left.values()):
            asks, budget = [], 32
            for name in rng.sample(list(left), len(left)):
                scheduled = min(left[name], budget, rng.randint(1, 32))
                if scheduled:
                    asks.append(ScheduledRequest(name, scheduled))
                    left[name] -= scheduled
                    budget -= scheduled
            given = manager.allocate(asks)
            manager.commit(given.step, {a.request_id: [0] for a in asks if not left[a.request_id]})
            manager.retire(given.step)
        assert manager.stats()["requests"] == count


def test_the_room_imports_nothing_heavy():
    code = (
        "import sys, kvcore.manage.manager, kvcore.manage.explain;"
        "print([m for m in ('torch', 'hydra', 'transformers', 'xxhash') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
