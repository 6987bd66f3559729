"""Replays for tests: the geometry of Llama-3.1-8B, any trace, any cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcore.attention.declaration import DeviceFacts
from kvcore.engine.settings import CacheSettings, EngineSettings, Limits
from kvcore.models.families import model_facts
from kvcore.registry.loader import installed
from kvcore.replay.replay import Replay
from kvcore.replay.setup import prepare
from kvcore.replay.step_cost import StepCost
from kvcore.replay.trace import Trace

DATA = Path(__file__).resolve().parents[1] / "data"
LLAMA = DATA / "hf_configs/meta-llama--Meta-Llama-3.1-8B_config.json"
LIMITS = {"max_model_len": 262144, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
PUBLISHED = StepCost(0.02, 2e-5)


def make_replay(
    trace: Trace,
    *,
    config: Path = LLAMA,
    cost: StepCost = PUBLISHED,
    pace: str = "trace",
    most_output: int | None = None,
    every: float = 10.0,
    **keys: Any,
) -> Replay:
    """A replay that is ready to run; `keys` are limits, or fields of `CacheSettings`."""
    limits = {name: keys.pop(name, value) for name, value in LIMITS.items()}
    cache = CacheSettings(**keys)
    facts = model_facts(json.loads(config.read_text()), dtype="bfloat16", cache=cache)
    settings = EngineSettings(facts, None, DeviceFacts("cpu", "test"), cache=cache, engine=Limits(**limits))
    return prepare(settings, installed(), trace, cost, every=every, pace=pace, most_output=most_output)[0]
